# SPDX-License-Identifier: Apache-2.0
"""
An ordinary small language model as a draft: it reads the text itself, not the target's features. Level 2.

It drafts trees through the same policy as every other draft, and trains through the same interface.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from gto_hf.target import backend_mask, check_backend, decoding_route, fingerprint, position_limit, text_config, unwrap
from gto_hf.tree import TreeConfig

from .attention import KeyValues
from .base import DraftModel, DraftOutput
from .config import DraftConfig


class CausalLMDraft(DraftModel):
    """
    Wraps any causal LM that has the target's tokenizer.

    Its `features` are the model's last hidden states; below the root each node reads its own token and its ancestors'
    keys, as the model would when it wrote that path. `draft.model.save_pretrained(folder)` gives the plain model back.

    Args:
        model (`PreTrainedModel`): The small model, used as it is (not copied). A [`DraftConfig`] makes a random one.
        target (`PreTrainedModel`, *optional*): Needed if the two differ in the rows of their vocabularies (padding); the
            draft then says only what both have.
        tree ([`TreeConfig`], *optional*): Decoding tree.

    Raises:
        ValueError: If the small model cannot run over a tree, or target and model cannot share a tokenizer.

    Example:

    ```python
    draft = CausalLMDraft(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), target=model)
    model.generate(**inputs, assistant_model=draft)
    ```
    """

    reads_features = False
    supports_gradient_checkpointing = False  # the layers would lose their keys, which nodes read

    def __init__(
        self, model: PreTrainedModel | DraftConfig, target: nn.Module | None = None, *, tree: TreeConfig | None = None
    ) -> None:
        if isinstance(model, DraftConfig):
            super().__init__(model)
            fields = dict(model.lm)
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
        else:
            _check_model(model)
            super().__init__(_config_of(model, target, tree))
            self.model = model
            self.t2d[: self.config.draft_vocab_size] = True
            self.to(model.device)
        self._target: Any = None
        self._no_split_modules = getattr(self.model, "_no_split_modules", None)
        self.post_init()
        if not isinstance(model, DraftConfig):
            self.train(model.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing of the small model is touched; the maps keep every id of both vocabularies."""
        if isinstance(module, CausalLMDraft):
            self.d2t.zero_()
            self.t2d.zero_()
            self.t2d[: self.config.draft_vocab_size] = True

    @property
    def dtype(self) -> torch.dtype:
        """Of the small model's weights."""
        return self.model.dtype

    # ------------------------------------------------------------------ draft interface
    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.fuse`]: the target's features are not read."""
        return target_features

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        position_ids: torch.Tensor,
        past: list[KeyValues] | None,
        past_mask: torch.Tensor,
        nodes: list[KeyValues] | None = None,
        node_mask: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> DraftOutput:
        """
        See [`DraftModel.forward`]. The last entry of `key_values` holds positions `(rows, 1, F, 1)` for models with windows.

        The token of pair `j` stands at position `j + 1`.
        """
        rows, width = input_ids.shape
        positions = (position_ids + 1).clamp(min=0)
        key_values = past
        visible = past_mask
        if node_mask is not None:
            visible = torch.cat([past_mask[:, None].expand(-1, width, -1), node_mask], dim=-1)
            repeats = rows // past[0][0].shape[0]
            key_values = [tuple(x.repeat_interleave(repeats, dim=0) for x in layer) for layer in past]
            if nodes is not None:
                key_values = [
                    tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
                    for old, new in zip(key_values, nodes, strict=True)
                ]
        # Without a config every layer keeps everything; the mask does the windows.
        cache = DynamicCache() if key_values is None else DynamicCache(key_values[:-1])
        own = positions[:, None, :, None]
        keys = own if key_values is None else torch.cat([key_values[-1][0], own], dim=2)
        output = _body(self.model)(
            # Padding rows of a larger target stand for no token; should one occur, the draft may read anything.
            input_ids=input_ids.clamp(max=text_config(self.model).vocab_size - 1),
            attention_mask=backend_mask(self.model, visible, self.model.dtype, positions, keys[:, 0, :, 0]),
            position_ids=positions,
            cache=cache,
            use_cache=True,
        )
        new = [(layer.keys[:, :, -width:], layer.values[:, :, -width:]) for layer in cache.layers]
        return DraftOutput(features=output.last_hidden_state, key_values=[*new, (own, own)])

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.head`]: the model's own head, with what its config does to logits."""
        config = text_config(self.model)
        logits = self.model.get_output_embeddings()(features)[..., : self.config.draft_vocab_size]
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return logits if cap is None else cap * (logits / cap).tanh()

    # ------------------------------------------------------------------ target
    def check_target(self, target: nn.Module, tokenizer: Any = None) -> None:
        """
        See [`DraftModel.check_target`].

        Raises:
            ValueError: If the vocabularies differ and the draft was not made for this target's.
        """
        found = fingerprint(target)
        if found["vocab_size"] != self.config.vocab_size:
            raise ValueError(
                f"The small model has a vocabulary of {self.config.vocab_size} rows, the target {found['vocab_size']}. If "
                "they share a tokenizer and differ in padding only, make the draft with "
                "`CausalLMDraft(model, target=target)`."
            )

    def attach(self, target: nn.Module, tokenizer: Any = None) -> Self:
        """Check the target; nothing is borrowed. Idempotent."""
        model = unwrap(target)
        if (
            self._target is None
            or self._target() is not model
            or text_config(model).vocab_size != self.config.vocab_size
        ):
            self.check_target(target)
            self._target = weakref.ref(model)
        return self

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The small model's own embeddings."""
        return self.model.get_input_embeddings()(input_ids)

    def position_limit(self) -> int | None:
        """See [`DraftModel.position_limit`]: the small model's own."""
        return position_limit(self.model)

    def get_input_embeddings(self) -> nn.Module:
        """The small model's embedding."""
        return self.model.get_input_embeddings()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_target": None}


def _body(model: PreTrainedModel) -> nn.Module:
    """The model below the head, which returns hidden states."""
    body = model.get_decoder()
    if body is not model:
        return body
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))  # Llama 4 names itself


def _check_model(model: nn.Module) -> None:
    """Refuse what is no causal LM, or cannot run over a tree."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"`CausalLMDraft` wraps a causal language model, got {type(model).__name__}.")
    route = decoding_route(model)
    if route.kind != "tree":
        raise ValueError(
            f"{route.reason}, so it cannot draft a tree. Pass the plain model as `assistant_model`: transformers drafts a "
            "chain with it."
        )
    check_backend(model)


def _config_of(model: PreTrainedModel, target: nn.Module | None, tree: TreeConfig | None) -> DraftConfig:
    """A [`DraftConfig`] that remembers the small model's own config."""
    source = text_config(model)
    own, rows = source.vocab_size, source.vocab_size
    if target is not None:
        rows = text_config(target).vocab_size
        if abs(rows - own) > max(1024, rows // 50):
            raise ValueError(
                f"The small model has a vocabulary of {own} rows, the target {rows}: too far apart for one tokenizer. Pass "
                "the plain model and both tokenizers to `generate`: transformers translates between them."
            )
    fields = {**model.config.to_dict(), "dtype": None}
    return DraftConfig(
        draft_type="causal_lm",
        lm=fields,
        vocab_size=rows,
        draft_vocab_size=min(rows, own),
        hidden_size=source.hidden_size,
        num_hidden_layers=source.num_hidden_layers,
        tree=None if tree is None else tree.to_dict(),
        target=None if target is None else fingerprint(target),
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
