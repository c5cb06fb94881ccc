# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 checkpoints in SafeAILab's layout: what their files leave unsaid, decided from tensors or refused. Level 3.

Their `config.json` is a plain Llama one with `draft_vocab_size`. Tensor names are ours. Sizes come from the tensors; the
config is only checked against them. What neither says (feature layers of an unknown target) is an argument.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig
from gto_hf.target import default_feature_layers


# Always there; `d2t` and `t2d` exactly if the vocabulary is reduced, `embed_tokens.weight` exactly if it is the draft's own.
REQUIRED = (
    "fc.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "lm_head.weight",
)


def matches(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these tensors are an EAGLE-3 draft in SafeAILab's layout."""
    return "fc.weight" in tensors and any(key.startswith("midlayer.") for key in tensors)


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """
    Complete config and state dict of a draft.

    Args:
        source (`str`): For messages.
        config (`dict`): Their `config.json`.
        tensors (`dict[str, torch.Tensor]`): Their tensors.
        feature_layers (`list[int]`, *optional*): `hidden_states` indices; their files do not hold them.
        target_layers (`int`, *optional*): Layers of the target, for EAGLE-3's rule `(2, n // 2, n - 3)`.

    Raises:
        DraftCheckpointError: Names missing tensors, contradicting sizes, or the missing argument.
    """
    missing = [key for key in REQUIRED if key not in tensors]
    if missing:
        raise DraftCheckpointError(
            f"`{source}` reads as EAGLE-3 in SafeAILab's layout, but {len(missing)} of {len(REQUIRED)} required tensors "
            f"are missing: {', '.join(f'`{k}`' for k in missing[:5])}."
        )
    tensors = dict(tensors)
    width, fused = tensors["fc.weight"].shape
    draft_vocab = tensors["lm_head.weight"].shape[0]
    heads = config["num_attention_heads"]
    # Their `embed_tokens` is a copy of the target's unless the widths differ; a stored one is kept as the draft's own.
    own = "embed_tokens.weight" in tensors
    vocab = tensors["embed_tokens.weight"].shape[0] if own else config["vocab_size"]
    if "t2d" in tensors:
        vocab = tensors["t2d"].shape[0]
    target_width = config.get("target_hidden_size") or width
    layers = feature_layers
    if layers is None:
        if target_layers is None:
            raise DraftCheckpointError(
                f"`{source}` does not say which layers of its target it reads. Pass `target=` (EAGLE-3's rule is then "
                "(2, n // 2, n - 3)) or `feature_layers=` as indices into `hidden_states`."
            )
        layers = default_feature_layers(target_layers)
    if fused != len(layers) * target_width:
        raise DraftCheckpointError(
            f"`fc.weight` of `{source}` reads {fused} features, but {len(layers)} layers of width {target_width} give "
            f"{len(layers) * target_width}. Pass the right `feature_layers=`."
        )
    q_rows, k_rows = (tensors[f"midlayer.self_attn.{name}_proj.weight"].shape[0] for name in ("q", "k"))
    head_dim = q_rows // heads
    if head_dim * heads != q_rows or k_rows % head_dim:
        raise DraftCheckpointError(
            f"`num_attention_heads={heads}` of `{source}` does not divide its projections of {q_rows} and {k_rows} rows."
        )
    made = DraftConfig(
        draft_type="eagle3",
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        hidden_size=width,
        target_hidden_size=target_width,
        own_embeddings=own,
        intermediate_size=tensors["midlayer.mlp.gate_proj.weight"].shape[0],
        num_attention_heads=heads,
        num_key_value_heads=k_rows // head_dim,
        head_dim=head_dim,
        hidden_act=config.get("hidden_act", "silu"),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope_parameters=_rope(config),
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
        feature_layers=list(layers),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        trained_length=config.get("max_position_embeddings"),
    )
    _complete_vocab(source, made, tensors)
    return made, tensors


def _complete_vocab(source: str, config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Add what the file may leave out: the identity map of a full vocabulary, and the mask."""
    size, full = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if size != full:
            raise DraftCheckpointError(
                f"`{source}` has a head of {size} rows for {full} target tokens but no `d2t` that says which ones."
            )
        tensors["d2t"] = torch.zeros(size, dtype=torch.long)
    tensors["d2t"] = tensors["d2t"].long()
    if "t2d" not in tensors:
        kept = tensors["d2t"] + torch.arange(size)
        tensors["t2d"] = torch.zeros(full, dtype=torch.bool)
        tensors["t2d"][kept.clamp(0, full - 1)] = True
    tensors["t2d"] = tensors["t2d"].bool()


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters the draft was trained with: its own config's, never the target's; base 10,000 if unsaid."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    rope = dict(config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope["rope_theta"] = float(config.get("rope_theta", 10000.0))
    return rope
