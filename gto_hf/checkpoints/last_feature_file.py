# SPDX-License-Identifier: Apache-2.0
"""
What the files of all drafts on the target's last hidden state have in common: one Llama layer, sizes, biases. Level 3.

Sizes and biases come from the tensors; the config is checked against them. Of the config's own say are only the number of
heads, the rotary embedding, the norms' epsilon and the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gto_hf.drafts import DRAFTS, DraftCheckpointError, DraftConfig, check_loaded

from .rope import read_rope


# The layer, after every dialect's names have become ours.
LAYER = (
    "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.v_proj.weight",
)
BIASES = tuple(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")
EMBEDDING = "embed_tokens.weight"


def draft_of(
    what: str,
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    required: tuple[str, ...],
    feature_layers: list[int] | None,
    target_layers: int | None,
    theirs: Callable[[str], str] = str,
    decided: tuple[str, ...] = (),
    **fields: Any,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """
    Config and complete state dict of a draft whose tensors have our names.

    Args:
        what (`str`): The layout, for messages.
        source (`str`): Folder or Hub id, for messages.
        config (`dict`): Their Llama config.
        tensors (`dict[str, torch.Tensor]`): In our names; changed by nothing.
        required (`tuple[str, ...]`): Tensors that must be there beside the layer's.
        feature_layers, target_layers: See [`AutoDraft.from_pretrained`]; one of them tells the number of the last layer.
        theirs (`Callable`, *optional*): From our name of a tensor to the one in the file, for messages.
        decided (`tuple[str, ...]`, *optional*): What the dialect had to decide, for `config.source`.
        **fields: [`DraftConfig`] fields that are the draft type's own.

    Raises:
        DraftCheckpointError: Names tensors that are missing, left over or of the wrong shape, contradicting sizes, or the
            missing argument.
    """
    saved = [
        name for name in tensors if name.endswith("rotary_emb.inv_freq")
    ]  # old transformers saved what it computes
    decided = (*decided, *(f"`{theirs(name)}` is left out: it follows from the config" for name in saved))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in saved}
    needed = (*required, *LAYER, *(BIASES if any(name in tensors for name in BIASES) else ()))
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise DraftCheckpointError(
            f"`{source}` reads as {what}, but {len(missing)} of {len(needed)} required tensors are missing: "
            f"{', '.join(f'`{theirs(name)}`' for name in missing[:5])}."
        )
    own = EMBEDDING in tensors
    sizes = {
        "hidden_size": "layers.0.post_attention_layernorm.weight",
        "intermediate_size": "layers.0.mlp.gate_proj.weight",
    } | ({"vocab_size": EMBEDDING} if own else {})
    found = {field: _size(source, config, tensors[name], theirs(name), field) for field, name in sizes.items()}
    vocab = found.pop("vocab_size", config.get("vocab_size"))
    if vocab is None:
        raise DraftCheckpointError(f"`{source}` stores no embedding, and its config has no `vocab_size`.")
    rope, decisions = read_rope(source, config)
    made = DraftConfig(
        **found,
        **_heads(source, config, tensors, theirs),
        vocab_size=vocab,
        own_embeddings=own,
        attention_bias=BIASES[0] in tensors,
        hidden_act=config.get("hidden_act", "silu"),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope_parameters=rope,
        feature_layers=_last_layer(what, source, feature_layers, target_layers),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        trained_length=config.get("trained_length", config.get("max_position_embeddings")),
        source={"dialect": what, "decisions": [*decisions, *decided]},
        **fields,
    )
    whole = {"d2t": torch.zeros(vocab, dtype=torch.long), "t2d": torch.ones(vocab, dtype=torch.bool)}
    _check_all(source, made, tensors | whole, theirs)
    return made, tensors | whole


def _check_all(
    source: str, config: DraftConfig, tensors: dict[str, torch.Tensor], theirs: Callable[[str], str]
) -> None:
    """Compare all names and shapes with those of such a draft."""
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in DRAFTS[config.draft_type](config).state_dict().items()}
    missing, extra = set(wanted) - set(tensors), set(tensors) - set(wanted)
    check_loaded(source, [theirs(name) for name in missing], [theirs(name) for name in extra])
    wrong = [
        f"`{theirs(name)}` {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in wanted.items()
        if tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise DraftCheckpointError(f"`{source}` has tensors of the wrong shape: {', '.join(wrong[:5])}.")


def _size(source: str, config: dict[str, Any], tensor: torch.Tensor, name: str, field: str) -> int:
    """Rows of a tensor; the config must not say otherwise."""
    shape = tuple(tensor.shape)
    if not shape or config.get(field) not in (None, shape[0]):
        raise DraftCheckpointError(
            f"`{name}` of `{source}` has shape {shape}, but its config says `{field}={config.get(field)}`."
        )
    return shape[0]


def _heads(
    source: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], theirs: Callable[[str], str]
) -> dict[str, int]:
    """Number and size of the heads; only the number of query heads is taken from the config."""
    heads = config.get("num_attention_heads")
    if not heads:
        raise DraftCheckpointError(f"The config of `{source}` has no `num_attention_heads`, which no tensor tells.")
    rows = {name: len(tensors[f"layers.0.self_attn.{name}_proj.weight"]) for name in "qk"}
    dim = rows["q"] // heads
    stated = {"head_dim": dim, "num_key_value_heads": rows["k"] // max(dim, 1)}
    fits = dim > 0 and rows["q"] == dim * heads and rows["k"] == dim * stated["num_key_value_heads"]
    if not fits or any(config.get(field) not in (None, value) for field, value in stated.items()):
        said = {field: config.get(field) for field in ("num_attention_heads", *stated)}
        raise DraftCheckpointError(
            f"`{theirs('layers.0.self_attn.q_proj.weight')}` and `k_proj.weight` of `{source}` have {rows['q']} and {rows['k']} rows, which "
            f"does not fit its config: {', '.join(f'`{field}={value}`' for field, value in said.items())}."
        )
    return {"num_attention_heads": heads, **stated}


def _last_layer(what: str, source: str, feature_layers: list[int] | None, target_layers: int | None) -> list[int]:
    """`[n]` for a target of `n` layers: the hidden state behind the last one."""
    if feature_layers is not None:
        return list(feature_layers)
    if target_layers is None:
        raise DraftCheckpointError(
            f"`{source}` reads as {what}, which reads the target's last hidden state, but does not say how many layers the target "
            "has. Pass `target=`, or `feature_layers=[n]` for a target of n layers."
        )
    return [target_layers]
