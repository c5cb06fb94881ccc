# SPDX-License-Identifier: Apache-2.0
"""
Fresh drafts in the shape of their target. Level 2.

Every draft that reads the target's features is made here; what each type copies from the target is its own.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from gto_hf.target import (
    default_feature_layers,
    final_norm,
    fingerprint,
    full_shape,
    gathered,
    text_config,
    unwrap,
)
from gto_hf.tree import TreeConfig

from .base import DraftModel
from .config import DraftConfig
from .vocab import choose_draft_vocab


class FeatureDraft(DraftModel):
    """
    Base class of drafts that read the target's features. Besides those of [`DraftModel`], a subclass has a `draft_type`
    and implements `_copy_from`.
    """

    # Its name in `DRAFTS`.
    draft_type: str

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        if config.draft_type != self.draft_type:
            raise ValueError(f"This is a draft of type `{config.draft_type}`. Load it with `gto_hf.AutoDraft`.")

    @staticmethod
    def default_layers(num_hidden_layers: int) -> list[int]:
        """Indices into the `hidden_states` of a target of so many layers that a draft of this type reads."""
        return default_feature_layers(num_hidden_layers)

    def _copy_from(self, target: nn.Module, *, layer: bool) -> None:
        """Start from what the target knows, where the shapes agree; its last layer only if `layer`."""
        raise NotImplementedError

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        *,
        draft_vocab_size: int | None = None,
        token_counts: torch.Tensor | None = None,
        tokenizer: Any = None,
        feature_layers: list[int] | tuple[int, ...] | None = None,
        tree: TreeConfig | None = None,
        dtype: torch.dtype | None = None,
        init: str = "target",
        **config_kwargs: Any,
    ) -> Self:
        """
        A fresh draft shaped like its target, ready to train.

        Width, heads, norm epsilon, activation and RoPE are the target's. What is not copied from the target starts random,
        under the global torch seed.

        Args:
            target (`PreTrainedModel`): Unchanged causal LM.
            draft_vocab_size (`int`, *optional*): Rows of the draft's head; defaults to the whole vocabulary.
            token_counts (`torch.LongTensor` of shape `(V,)`, *optional*): Token frequencies in the training text (see
                [`count_tokens`]). Needed for a reduced vocabulary.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Its special and added tokens are always kept.
            feature_layers (`list[int]`, *optional*): Indices into the target's `hidden_states`; defaults to what
                drafts of this type read (EAGLE-3: `(2, n // 2, n - 3)`; EAGLE-1/2 and GRIFFIN: `(n,)`).
            tree ([`TreeConfig`], *optional*): Decoding tree.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the draft's weights.
            init (`str`, *optional*, defaults to `"target"`): What starts as a copy of the target's, where the shapes agree:
                `"target"`: head rows and final norm of drafts that have them and, for targets built like Llama, the layer;
                `"head"`: head rows and final norm; `"random"`: nothing.
            **config_kwargs: Any [`DraftConfig`] field, for example `hidden_size=1024`, or an EAGLE-3.1 draft's
                `norm_before_fc=True, norm_before_residual=True, norm_output=True`.

        Raises:
            ValueError: If a reduced vocabulary comes without counts, or the fields do not fit each other.
        """
        if init not in ("target", "head", "random"):
            raise ValueError(f"`init={init!r}`: choose `target`, `head` or `random`.")
        config = cls._config_like(target, draft_vocab_size, feature_layers, tree, config_kwargs)
        draft = cls(config).to(dtype or torch.float32)
        if config.draft_vocab_size < config.vocab_size:
            if token_counts is None:
                raise ValueError(
                    f"`draft_vocab_size={config.draft_vocab_size}` of {config.vocab_size} tokens needs `token_counts`: "
                    "which tokens are kept decides what the draft can say. Use `gto_hf.count_tokens(rows, vocab_size)` for "
                    "rows of ids, or `gto_hf.data.dataset_token_counts(dataset, tokenizer, vocab_size)`."
                )
            if len(token_counts) != config.vocab_size:
                raise ValueError(
                    f"`token_counts` has {len(token_counts)} entries, but the target has {config.vocab_size} tokens. "
                    "Count with `vocab_size` of the target's config."
                )
            keep = _structural_ids(target, tokenizer)
            draft.set_vocab(choose_draft_vocab(token_counts.cpu(), config.draft_vocab_size, keep))
        model = unwrap(target)
        if init != "random":
            with gathered(
                model.get_output_embeddings(),
                model.get_input_embeddings(),
                final_norm(target),
                *last_layers(target, config.num_hidden_layers),
            ):
                draft._copy_from(target, layer=init == "target")
        return draft.attach(target, tokenizer)

    @classmethod
    def _config_like(
        cls,
        target: nn.Module,
        draft_vocab_size: int | None,
        feature_layers: list[int] | tuple[int, ...] | None,
        tree: TreeConfig | None,
        overrides: dict[str, Any],
    ) -> DraftConfig:
        """A [`DraftConfig`] with the target's shape; `overrides` win."""
        source = text_config(target)
        width = overrides.get("hidden_size", source.hidden_size)
        heads = source.num_attention_heads
        fields: dict[str, Any] = {
            "draft_type": cls.draft_type,
            "vocab_size": source.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "hidden_size": width,
            "target_hidden_size": source.hidden_size,
            "own_embeddings": width != full_shape(unwrap(target).get_input_embeddings().weight)[-1],
            "intermediate_size": _one(getattr(source, "intermediate_size", None)) or 4 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
            "head_dim": getattr(source, "head_dim", None) or width // heads,
            "hidden_act": "silu",
            "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
            "max_position_embeddings": getattr(source, "max_position_embeddings", 2048),
            "rope_parameters": _plain_rope(source),
            "feature_layers": feature_layers or cls.default_layers(source.num_hidden_layers),
            "tree": None if tree is None else tree.to_dict(),
            "target": fingerprint(target),
            "bos_token_id": source.bos_token_id,
            "eos_token_id": source.eos_token_id,
            "pad_token_id": source.pad_token_id,
            "initializer_range": getattr(source, "initializer_range", 0.02),
        }
        return DraftConfig(**{**fields, **overrides})


def copy_weight(to: torch.Tensor, source: torch.Tensor | None, rows: torch.Tensor | None = None) -> None:
    """Copy if there is something of the same shape to copy."""
    source = _plain(source)
    if source is None:
        return
    if rows is not None and source.shape[-1] == to.shape[-1]:
        source = source[rows.to(source.device)]
    if source.shape == to.shape:
        to.copy_(source)


def _plain(weight: torch.Tensor | None) -> torch.Tensor | None:
    """A weight as an ordinary tensor; None for packed ones (bitsandbytes), which only their layer can read."""
    if weight is None or not weight.is_floating_point():
        return None
    # torchao's weights say that they are floating point, but cannot be indexed or copied from.
    return weight if type(weight) in (torch.Tensor, nn.Parameter) else weight.dequantize()


def last_layers(target: nn.Module, count: int) -> list[nn.Module]:
    """The target's last `count` decoder layers, lowest first; fewer if it has fewer whose parts have Llama's names."""
    layers = [m for m in unwrap(target).modules() if hasattr(m, "self_attn") and hasattr(m, "input_layernorm")]
    return layers[-count:]


def _one(value: Any) -> Any:
    """The last of a list: some targets (Gemma 3n) give a size per layer."""
    return value[-1] if isinstance(value, (list, tuple)) else value


def _plain_rope(source: Any) -> dict[str, Any]:
    """The target's rotary parameters if they are one flat set; otherwise the default rotary with base 10,000."""
    rope = getattr(source, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or rope.get("mrope_section"):
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return dict(rope)


def _structural_ids(target: nn.Module, tokenizer: Any) -> set[int]:
    """Ids that are rare in text but must stay sayable: special, added and byte-level tokens, BOS and EOS."""
    config = unwrap(target).config
    keep: set[int] = set()
    for source in (text_config(target), getattr(unwrap(target), "generation_config", None), config):
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(source, name, None)
            keep.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if tokenizer is not None:
        keep.update(tokenizer.all_special_ids)
        keep.update(tokenizer.added_tokens_decoder)
        # Every byte must stay sayable, or text outside the corpus's alphabet drafts nothing.
        single = [token for token in tokenizer.get_vocab() if len(token) == 1 or _is_byte(token)]
        keep.update(i for i in tokenizer.convert_tokens_to_ids(single) if i is not None)
    return keep


def _is_byte(token: str) -> bool:
    """Whether a token is a SentencePiece byte such as `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
