# SPDX-License-Identifier: Apache-2.0
"""What of a draft an engine cannot express, found from its config alone, so also before it is trained. Level 4."""

from __future__ import annotations

from typing import Any

from gto_hf.drafts import DraftConfig
from gto_hf.target import default_feature_layers

from .dialects import FLAGS, Dialect, find_dialect


def check_exportable(config: DraftConfig, engine: str, *, depth: int | None = None) -> Dialect:
    """
    Raise `ValueError` if a draft with this config could not be exported; returns the dialect that it would be written in.

    Args:
        config ([`DraftConfig`]): Of the draft, trained or not.
        engine (`str`): `"sglang"`, `"vllm"`, `"speculators"` or `"safeailab"`.
        depth (`int`, *optional*): Layers of the target; defaults to what the config says.
    """
    dialect = find_dialect(engine, config.draft_type)
    problems = [*_layers(config, dialect), *_vocabulary(config, dialect), *_flags(config, dialect)]
    depth = depth or (config.target or {}).get("num_hidden_layers")
    problems += [*_shapes(config, dialect), *_features(config, dialect, depth), *_embedding(config, dialect)]
    if problems:
        raise ValueError(f"This draft cannot be exported to {engine}: " + "; ".join(problems) + ".")
    return dialect


def _layers(config: DraftConfig, dialect: Dialect) -> list[str]:
    if dialect.layers is not None and config.num_hidden_layers > dialect.layers:
        return [f"it has `num_hidden_layers={config.num_hidden_layers}`, and {dialect.engine} reads {dialect.layers}"]
    return []


def _vocabulary(config: DraftConfig, dialect: Dialect) -> list[str]:
    if config.draft_vocab_size == config.vocab_size or "d2t" in dialect.optional:
        return []
    return [
        f"a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens needs a map, and {dialect.engine} "
        f"reads none for drafts of type `{config.draft_type}`"
    ]


def _flags(config: DraftConfig, dialect: Dialect) -> list[str]:
    found = []
    for name, meaning in FLAGS.items():
        value = getattr(config, name, None)
        if value and name not in dialect.flags:
            found.append(f"`{name}={value}` ({meaning}) has no place in its format")
    if dialect.joint_bias:
        inputs, output = bool(config.attention_bias), bool(getattr(config, "attention_output_bias", False))
        joint = not getattr(
            config, "qk_norm", False
        )  # its layer with norms on queries and keys has a bias on q, k, v only
        if inputs != output if joint else output:
            found.append(
                f"`attention_bias={inputs}` with `attention_output_bias={output}`: its layers have biases on q, k, v and o "
                "together, or with `qk_norm` on q, k and v only"
            )
    return found


def _shapes(config: DraftConfig, dialect: Dialect) -> list[str]:
    found = []
    if not dialect.free_head_dim and config.head_dim * config.num_attention_heads != config.hidden_size:
        found.append(
            f"`head_dim={config.head_dim}` is not `hidden_size / num_attention_heads = {config.hidden_size} / "
            f"{config.num_attention_heads}`, which its loader takes it to be"
        )
    if dialect.silu_only and config.hidden_act != "silu":
        found.append(f"`hidden_act={config.hidden_act!r}`: its layers know `silu` only")
    rope: dict[str, Any] = config.rope_parameters or {}
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind not in dialect.rope_types:
        found.append(f"its rotary embedding is of type `{kind}`; known are {', '.join(sorted(dialect.rope_types))}")
    if part != 1.0:
        found.append(f"`partial_rotary_factor={part}`: its layers turn whole heads")
    return found


def _features(config: DraftConfig, dialect: Dialect, depth: int | None) -> list[str]:
    layers = list(config.feature_layers)
    if config.draft_type != "eagle3":
        return []
    if depth is not None and depth in layers:
        return [
            f"`feature_layers={layers}` holds {depth}, the state after the target's final norm, and engines take states "
            "before it"
        ]
    if layers and layers[0] == 0:
        return [f"`feature_layers={layers}` holds 0, the embeddings; engines number layer outputs, and that is none"]
    if dialect.named_features:
        return []
    if depth is None:
        return ["its target's number of layers is unknown, and its format has no layer ids. Pass the target"]
    try:
        rule = default_feature_layers(depth)
    except ValueError as error:
        return [str(error).rstrip(".")]
    if layers != rule:
        return [
            f"`feature_layers={layers}`, but its format has no layer ids: it always reads {rule} of {depth} layers"
        ]
    return []


def _embedding(config: DraftConfig, dialect: Dialect) -> list[str]:
    """An embedding of the draft's own must be one that the engine keeps."""
    if not config.own_embeddings or dialect.embedding in ("optional", "stored"):
        return []
    if dialect.engine == "safeailab":  # kept, because `target_hidden_size` is written
        return []
    if dialect.embedding == "other width" and config.target_hidden_size != config.hidden_size:
        return []
    return ["the draft has a token embedding of its own, and the engine would put the target's in its place"]
