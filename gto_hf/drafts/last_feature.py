# SPDX-License-Identifier: Apache-2.0
"""
Drafts that predict the target's next last hidden state and let the target's own head read it. Level 2.

The feature is what the head reads: the hidden state after the target's final norm.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from gto_hf.target import LogitHead, fingerprint, full_shape, target_head, unwrap

from .attention import DraftRotaryEmbedding, KeyValues
from .base import Borrowed, DraftOutput
from .config import DraftConfig
from .fresh import FeatureDraft, copy_weight, last_layers


class LastFeatureDraft(FeatureDraft):
    """
    Base class of EAGLE-1/2 and GRIFFIN. A subclass implements `__init__` (with `layers` of one layer) and `inputs`.

    Of its outputs, the first `H` columns are read by the head and the last `H` are the next pair's feature; a draft whose
    outputs are `H` wide uses them for both.
    """

    predicts_features = True

    layers: nn.ModuleList

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self._borrowed_head = Borrowed()
        self.rotary_emb = DraftRotaryEmbedding(config)

    @staticmethod
    def default_layers(num_hidden_layers: int) -> list[int]:
        """See [`FeatureDraft.default_layers`]: the last hidden state alone."""
        return [num_hidden_layers]

    # ------------------------------------------------------------------ draft interface
    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Input of the layer `(rows, F, H)` from token embeddings and features `(rows, F, H)`."""
        raise NotImplementedError

    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.fuse`]: the one feature as it is."""
        return target_features.to(self.device, self.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[KeyValues] | None,
        past_mask: torch.Tensor,
        nodes: list[KeyValues] | None = None,
        node_mask: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> DraftOutput:
        """See [`DraftModel.forward`]."""
        embeddings = self.embed(input_ids) if embeddings is None else embeddings
        inputs = self.inputs(embeddings, self.next_feature(features))
        rotary = self.rotary_emb(inputs, position_ids)
        past_layer = past[0] if past else None
        nodes_layer = nodes[0] if nodes else None
        outputs, new = self.layers[0](inputs, rotary, past_layer, past_mask, nodes_layer, node_mask)
        return DraftOutput(features=outputs, key_values=[new])

    def next_feature(self, outputs: torch.Tensor) -> torch.Tensor:
        """The estimate `(.., H)` of the target's last hidden state in outputs `(.., W)`; a fused feature is its own."""
        return outputs[..., -self.config.hidden_size :]

    def read_by_head(self, outputs: torch.Tensor) -> torch.Tensor:
        """What the head reads `(.., H)` of outputs `(.., W)`."""
        return outputs[..., : self.config.hidden_size]

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.head`]: the target's head, its scale and soft cap included; the kept rows of it."""
        head: LogitHead | None = self._borrowed_head.module
        if head is None:
            raise ValueError("This draft borrows its target's head: call `draft.attach(target)` first.")
        hidden, weight = self.read_by_head(features), getattr(head.module, "weight", None)
        if weight is not None:
            # An offloaded weight is brought to its input, and a packed one says nothing of the dtype that is read.
            device = features.device if weight.is_meta else weight.device
            hidden = hidden.to(device, weight.dtype if weight.is_floating_point() else None)
        if self.config.draft_vocab_size == self.config.vocab_size:
            return head(hidden).to(features.device)
        return head.rows(hidden, self.kept_ids.to(hidden.device)).to(features.device)

    # ------------------------------------------------------------------ target
    def check_target(self, target: nn.Module, tokenizer: Any = None) -> None:
        """
        See [`DraftModel.check_target`].

        Raises:
            ValueError: If another layer than the last is read, or the rows of a whole vocabulary are reordered.
        """
        super().check_target(target, tokenizer)
        layers, last = self.config.feature_layers, fingerprint(target)["num_hidden_layers"]
        if layers != [last]:
            raise ValueError(
                f"A draft of type `{self.draft_type}` reads its target's last hidden state, `feature_layers={[last]}` for "
                f"{last} layers, but this one says {layers}. Load the target it was trained for."
            )
        if self.config.draft_vocab_size == self.config.vocab_size and bool(self.d2t.any()):
            raise ValueError(
                "This draft uses its target's whole head, whose rows stand in the order of the ids, but its `d2t` is not "
                "zero. Make it zero, or keep fewer tokens."
            )

    def attach(self, target: nn.Module, tokenizer: Any = None) -> Self:
        """
        See [`DraftModel.attach`]; borrows the target's head as well, which is compared with its logits on a few ids first.

        Raises:
            ValueError: If it is not known how the target's logits follow from its last hidden state.
        """
        super().attach(target, tokenizer)
        known, module = self._borrowed_head.module, unwrap(target).get_output_embeddings()
        if known is None or known.module is not module:
            head, weight = target_head(target), getattr(module, "weight", None)
            plain = weight is not None and weight.is_floating_point()
            # Some heads (OPT's) read a projection of the hidden state.
            if head is None or plain and full_shape(weight)[-1] != self.config.hidden_size:
                raise ValueError(
                    f"A draft of type `{self.draft_type}` uses its target's head, but the logits of "
                    f"{type(unwrap(target)).__name__} do not follow from its last hidden state in a way that is known "
                    "here (or are not finite). Use an `eagle3` draft, which has a head of its own."
                )
            self._borrowed_head = Borrowed(head)
        return self

    @torch.no_grad()
    def _copy_from(self, target: nn.Module, *, layer: bool) -> None:
        """
        Start from what the target knows, where the shapes agree: its last layer, reading little but the feature.

        The draft then starts near the feature it was given, on the scale that the target's head expects.
        """
        if self.config.own_embeddings:
            copy_weight(self.embed_tokens.weight, unwrap(target).get_input_embeddings().weight)
        if not layer:
            return
        joint, width = self.joint, self.config.hidden_size
        joint.weight.mul_(0.1)
        joint.weight[:, -width:] += torch.eye(width, dtype=self.dtype, device=self.device)
        own = dict(self.layers[0].named_parameters())
        for name, weight in (pair for last in last_layers(target, 1) for pair in last.named_parameters()):
            if name == "mlp.down_proj.weight":  # GRIFFIN's writes two vectors; both start as the target's one
                for part in own[name].split(width):
                    copy_weight(part, weight)
            elif name in own:
                copy_weight(own[name], weight)

    @property
    def joint(self) -> nn.Linear:
        """The linear layer that joins embedding and feature."""
        return self.fc
