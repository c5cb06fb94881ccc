# SPDX-License-Identifier: Apache-2.0
"""
The one interface that decoding, training and checkpoints know of a draft. Level 2.

A draft reads *pairs*: the target's feature at position `j` with the token at `j + 1`. Its output at pair `j` proposes
the token at `j + 2`:

    position   0     1     2     3          root x_3, the last known token, is pair 2: it
    token      x_0   x_1   x_2   x_3        sees the target's features 0..2 and tokens 1..3
    pair       -     0     1     2          and its output gives the root's children (x_4)
    feature          f_0   f_1   f_2

Below the root no target feature exists; a node pairs its token with its parent's output, on rotary position
`pair + depth`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from gto_hf.target import (
    embed_raw,
    embedding_scale,
    fingerprint,
    full_shape,
    text_config,
    tokenizer_hash,
    unsplit_loading,
    unwrap,
)
from gto_hf.tree import CostCurve, TreeConfig

from .attention import KeyValues
from .config import DraftConfig, check_tree
from .pairing import check_padding, fit_vocabulary, warn_other_target, warn_other_tokenizer
from .vocab import check_vocab_buffers, vocab_buffers


class DraftCheckpointError(ValueError):
    """A folder that cannot be read as a draft; the message names the tensors or fields."""


@dataclass
class DraftOutput:
    """
    What a draft's layers return.

    Attributes:
        features (`torch.FloatTensor` of shape `(rows, F, W)`): Input of [`DraftModel.head`] and, below these
            positions, of the draft itself. `W` is the draft's width `H`, or more where the two read different parts.
        key_values (`list[tuple[torch.Tensor, torch.Tensor]]`): Per layer, keys and values of the new positions only.
    """

    features: torch.Tensor
    key_values: list[KeyValues]


class Borrowed:
    """Holds a module of the target outside the draft's module tree: not saved, trained, moved or deep-copied."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict) -> Borrowed:
        return self

    def __reduce__(self) -> tuple:
        return (Borrowed, ())


class DraftModel(PreTrainedModel):
    """
    Base class of all drafts. A subclass implements `__init__`, `fuse`, `forward` and `head`.

    The draft's vocabulary is stored as EAGLE-3 stores it: `d2t` `(Vd,)` int64 offsets and `t2d` `(V,)` bool.
    """

    config_class = DraftConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True

    # Whether the draft reads the target's features; one that does not reads the text from its first token on.
    reads_features = True
    # Whether its outputs estimate the target's last hidden state (see [`LastFeatureDraft`]).
    predicts_features = False

    # Makes a folder ready for a push, `(draft, Hub id, folder)`: card, no paths. Set by `gto_hf.hub`, which stands above.
    prepare_push: Callable[..., None] | None = None

    config: DraftConfig

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self._borrowed = Borrowed()
        self.costs: CostCurve | None = None  # set to decide what an automatic tree reckons with; else it is measured
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DraftModel):
            # A reduced vocabulary has no default map: `t2d` stays empty and `attach` refuses it until one is set.
            full = self.config.draft_vocab_size == self.config.vocab_size
            init.zeros_(module.d2t)
            init.constant_(module.t2d, full)

    # ------------------------------------------------------------------ to be implemented
    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """Concatenated target features `(rows, F, len(feature_layers) * Ht)` to draft width `(rows, F, H)`."""
        raise NotImplementedError

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
        """
        Run the draft's layers on new pairs of a prefix, or on tree nodes. Writes no cache.

        Args:
            input_ids (`torch.LongTensor` of shape `(rows, F)`): Target-vocabulary ids.
            features (`torch.FloatTensor` of shape `(rows, F, H)`): Fused target features for a prefix, parents'
                outputs `(rows, F, W)` for nodes.
            position_ids (`torch.LongTensor` of shape `(rows, F)`): Pair indices (plus depth for nodes).
            past (`list[KeyValues]`, *optional*): Prefix, `(P, h_kv, T, d)` per layer.
            past_mask (`torch.BoolTensor`): `(P, F, T + F)` for a prefix, `(R, T)` for nodes; true = visible.
            nodes (`list[KeyValues]`, *optional*): Nodes so far, `(R, h_kv, S - F, d)` per layer.
            node_mask (`torch.BoolTensor` of shape `(R, F, S)`, *optional*): Given for nodes only.
            embeddings (`torch.FloatTensor` of shape `(rows, F, H)`, *optional*): In place of those of `input_ids`.
        """
        raise NotImplementedError

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Draft logits `(..., Vd)` from [`DraftOutput`] features `(..., W)`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ tree
    @property
    def tree(self) -> TreeConfig:
        """
        The tree this draft decodes with; assign a [`TreeConfig`] to change it. Saved in the config.

        `draft.tree = "auto"` chooses size and depth in every round, by what pays on this machine.
        """
        return TreeConfig(**self.config.tree)

    @tree.setter
    def tree(self, value: TreeConfig | str) -> None:
        if value == "auto":
            limits, width = TreeConfig(), min(TreeConfig().top_k, self.config.draft_vocab_size)
            most = width + (limits.depth - 1) * width**2
            value = TreeConfig(limits.depth, width, min(limits.total_tokens, most), auto=True)
        if not isinstance(value, TreeConfig):
            raise TypeError(f'`draft.tree` takes a TreeConfig or "auto", got {value!r}.')
        check_tree(value, self.config.draft_vocab_size)
        self.config.tree = value.to_dict()

    # ------------------------------------------------------------------ vocabulary
    @property
    def kept_ids(self) -> torch.Tensor:
        """`(Vd,)` int64: target id of every row of the head."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocab(self, kept: torch.Tensor) -> None:
        """
        Choose the target tokens that the head's rows stand for. Only for a fresh draft: rows are not moved.

        Args:
            kept (`torch.LongTensor` of shape `(Vd,)`): Distinct target ids.
        """
        if len(kept) != self.config.draft_vocab_size:
            raise ValueError(f"Got {len(kept)} ids for a head of {self.config.draft_vocab_size} rows.")
        d2t, t2d = vocab_buffers(kept.to(self.d2t.device), self.config.vocab_size)
        check_vocab_buffers(d2t, t2d, self.config.vocab_size)
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids of any shape to target ids."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of any shape to draft-vocabulary ids; -1 for tokens the draft cannot say."""
        table = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=self.d2t.device)
        table[self.kept_ids] = torch.arange(len(self.d2t), device=self.d2t.device)
        return table[target_ids]

    # ------------------------------------------------------------------ target
    def check_target(self, target: nn.Module, tokenizer: Any = None) -> None:
        """
        Compare this draft with a target before any forward.

        Args:
            target (`PreTrainedModel`): The target.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's. Where the two differ in the rows of their
                vocabularies, with the same tokenizer these are padding; it is then looked for where the target was loaded from.

        Raises:
            ValueError: If width, depth or vocabulary do not fit, or the draft has no vocabulary map.
        Warns:
            Once, if the sizes fit but the target says it is another model, revision or quantization, or has another
            tokenizer.
        """
        config, found = self.config, fingerprint(target)
        name = found["name_or_path"] or type(unwrap(target)).__name__
        if found["hidden_size"] != config.target_hidden_size:
            raise ValueError(
                f"This draft reads a target of width {config.target_hidden_size}, but {name} has "
                f"`hidden_size={found['hidden_size']}`. A draft serves only the target it was trained for."
            )
        if found["vocab_size"] != config.vocab_size:
            check_padding(config, target, found["vocab_size"], tokenizer, name)
        width = full_shape(unwrap(target).get_input_embeddings().weight)[-1]
        if not config.own_embeddings and width != config.hidden_size:
            raise ValueError(
                f"This draft of width {config.hidden_size} borrows its target's token embedding, but that of {name} has "
                f"width {width}. Make the draft with `own_embeddings=True`."
            )
        layers = found["num_hidden_layers"]
        if not config.feature_layers or config.feature_layers[-1] > layers:
            raise ValueError(
                f"This draft reads `feature_layers={config.feature_layers}`, but {name} has {layers} layers. Load the "
                "target it was trained for, or say which `hidden_states` indices it reads with `feature_layers=`."
            )
        made_for = (config.target or {}).get("num_hidden_layers")
        if made_for not in (None, layers):
            raise ValueError(
                f"This draft reads `feature_layers={config.feature_layers}` of a {made_for}-layer target "
                f"({config.target.get('name_or_path')}), but {name} has {layers} layers. Load that target."
            )
        if not bool(self.t2d.any()):
            raise ValueError(
                f"This draft has {config.draft_vocab_size} of {config.vocab_size} tokens but no map (`d2t`, `t2d`) that "
                "says which. Build it with `from_target(..., token_counts=...)` or call `set_vocab`."
            )
        known = {} if tokenizer is None else {"tokenizer": tokenizer_hash(tokenizer)}
        warn_other_target(self, found | known)

    def attach(self, target: nn.Module, tokenizer: Any = None) -> Self:
        """
        Check the target and borrow its token embedding, unless the draft has its own. Idempotent.

        The embedding is held outside the module tree: it is not saved, trained, or moved with the draft. A draft whose
        vocabulary is padded otherwise than the target's gets the target's rows.

        Args:
            target (`PreTrainedModel`): The target.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, as in [`check_target`]; its hash is remembered,
                and compared with the one that the draft remembers.
        """
        embedding, rows = unwrap(target).get_input_embeddings(), text_config(target).vocab_size
        if self._borrowed.module is not embedding or rows != self.config.vocab_size:  # resizing keeps the module
            self.check_target(target, tokenizer)
            fit_vocabulary(self, rows)
            self._borrowed = Borrowed(embedding)
        if tokenizer is not None:
            warn_other_tokenizer(self, tokenizer)
        if tokenizer is not None and self.config.target and not self.config.target.get("tokenizer"):
            self.config.target = {**self.config.target, "tokenizer": tokenizer_hash(tokenizer)}
        return self

    def borrowed_embedding(self) -> nn.Module | None:
        """The attached target's embedding module; None if there is none or the draft has its own."""
        return None if self.config.own_embeddings else self._borrowed.module

    def share_embedding(self, target: nn.Module) -> None:
        """Drop an embedding of the draft's own that is the target's, number for number; it will be borrowed."""
        if not self.config.own_embeddings:
            return
        own, theirs = self.embed_tokens.weight, unwrap(target).get_input_embeddings().weight
        if theirs.is_meta:  # offloaded: its numbers are not at hand, so the draft keeps its own
            return
        if own.shape == theirs.shape and torch.equal(own, theirs.detach().to(own.device, own.dtype)):
            del self.embed_tokens
            self.config.own_embeddings = False

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings `(rows, F, H)` from the draft's own or the attached target's table."""
        if self.config.own_embeddings:
            return self.embed_tokens(input_ids)
        if self._borrowed.module is None:
            raise ValueError("This draft borrows its target's embedding: call `draft.attach(target)` first.")
        return embed_raw(self._borrowed.module, input_ids).to(self.device, self.dtype)

    def prompt_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor | None:
        """
        What stands for the token embeddings of a prompt that `generate` got as `inputs_embeds` `(B, L, Ht)`.

        None if the draft has an embedding of its own: the target's mean nothing to it.
        """
        if self.config.own_embeddings or not self.reads_features:
            return None
        scale = embedding_scale(self._borrowed.module)
        return inputs_embeds.to(self.device, self.dtype) / scale

    def position_limit(self) -> int | None:
        """First position that the draft cannot read; None if its positions have no end."""
        return None

    def get_input_embeddings(self) -> nn.Module | None:
        """The draft's own embedding; None when it borrows the target's."""
        return self.embed_tokens if self.config.own_embeddings else None

    def get_output_embeddings(self) -> None:
        """None: the head has its own vocabulary, so nothing may tie, resize or fuse it."""
        return None

    def enable_input_require_grads(self) -> None:
        """Nothing to do: gradients enter through the layers, not the embedding (asked for by PEFT trainers)."""

    # ------------------------------------------------------------------ pushing and loading
    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """The last step of `push_to_hub` and of `save_pretrained(push_to_hub=True)`: the draft's own card goes along."""
        if self.prepare_push is not None:
            self.prepare_push(self, repo_id, Path(working_dir))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """
        Load a draft that `save_pretrained` wrote; every tensor must be there and nothing else.

        [`AutoDraft.from_pretrained`] reads this and the published layouts.

        Raises:
            DraftCheckpointError: Names missing, unexpected and misshapen tensors.
        """
        loading_info = kwargs.pop("output_loading_info", False)
        with unsplit_loading():
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                **{**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True},
            )
        if info["mismatched_keys"]:  # taken so far only to be named
            wrong = [f"`{key}` {tuple(there)} instead of {tuple(own)}" for key, there, own in info["mismatched_keys"]]
            raise DraftCheckpointError(
                f"`{pretrained_model_name_or_path}` has tensors of the wrong shape: {', '.join(sorted(wrong)[:5])}. Its "
                "`config.json` or its weights are another draft's."
            )
        check_loaded(str(pretrained_model_name_or_path), info["missing_keys"], info["unexpected_keys"])
        check_values(str(pretrained_model_name_or_path), model)
        return (model, info) if loading_info else model


def check_loaded(source: str, missing: Any, unexpected: Any) -> None:
    """Raise [`DraftCheckpointError`] if any tensor is missing or left over."""
    if not missing and not unexpected:
        return
    parts = []
    for what, keys in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if keys:
            shown = ", ".join(f"`{k}`" for k in keys[:5]) + (", ..." if len(keys) > 5 else "")
            parts.append(f"{len(keys)} tensors are {what}: {shown}")
    raise DraftCheckpointError(
        f"`{source}` is not a complete draft: {'; '.join(parts)}. Save or convert it again; a partly loaded draft writes "
        "the right text at no speed."
    )


def check_values(source: str, draft: DraftModel) -> None:
    """Raise [`DraftCheckpointError`] if the vocabulary map is broken or a weight is not finite."""
    try:
        check_vocab_buffers(draft.d2t, draft.t2d, draft.config.vocab_size)
    except ValueError as error:
        raise DraftCheckpointError(f"The vocabulary map of `{source}` is broken. {error}") from error
    broken = [name for name, p in draft.named_parameters() if not p.is_meta and not bool(torch.isfinite(p).all())]
    if broken:
        raise DraftCheckpointError(
            f"{len(broken)} tensors of `{source}` hold NaN or infinity: {', '.join(f'`{n}`' for n in broken[:5])}."
        )


def reference_copy(draft: nn.Module) -> nn.Module:
    """A frozen copy of a draft (PEFT wrapper included) in evaluation mode, sharing only the borrowed embedding."""
    return copy.deepcopy(draft).eval().requires_grad_(False)
