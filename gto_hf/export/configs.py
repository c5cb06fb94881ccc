# SPDX-License-Identifier: Apache-2.0
"""`config.json` as each engine reads it, in that engine's numbering and with its meaning of every flag. Level 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gto_hf.drafts import DraftConfig

from .dialects import Dialect


# The release whose `eagle3` has all the fields that are written.
SPECULATORS_VERSION = "0.7.0"


def engine_config(
    config: DraftConfig,
    dialect: Dialect,
    *,
    max_positions: int,
    dtype: str,
    verifier: str | None,
    verifier_architectures: list[str],
    speculative_tokens: int,
) -> dict[str, Any]:
    """
    The `config.json` of an export.

    Args:
        config ([`DraftConfig`]): Of the draft. dialect ([`Dialect`]): To write.
        max_positions (`int`): The target's: engines size tables by it and refuse a draft with fewer.
        dtype (`str`): Of the stored weights, for example `"bfloat16"`.
        verifier (`str`, *optional*): Hub id of the target; only speculators stores it.
        verifier_architectures (`list[str]`): Of the target's config.
        speculative_tokens (`int`): Length of a chain that speculators' config proposes.
    """
    fields = _layer_fields(config, max_positions) | {"torch_dtype": dtype, "trained_length": config.trained_length}
    if dialect.engine == "speculators":
        return _speculators(config, fields, dtype, verifier, verifier_architectures, speculative_tokens)
    writers: dict[str, Callable[[DraftConfig, dict[str, Any]], dict[str, Any]]] = {
        "safeailab": _safeailab,
        "sglang": _sglang,
        "vllm": _vllm,
    }
    return writers[dialect.engine](config, fields)


def _layer_fields(config: DraftConfig, max_positions: int) -> dict[str, Any]:
    """What all of them read: a Llama config. Rotary parameters stand there in the old form and in the new one."""
    rope = dict(config.rope_parameters)
    theta = rope.get("rope_theta", 10000.0)
    scaling = None
    if rope.get("rope_type", "default") != "default":
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"} | {"type": rope["rope_type"]}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**rope, "rope_theta": theta},
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "use_cache": True,
        **_window(config),
    }


def _window(config: DraftConfig) -> dict[str, Any]:
    window = getattr(config, "sliding_window", None)
    if not window:
        return {}
    return {
        "sliding_window": window,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * config.num_hidden_layers,
    }


def _safeailab(config: DraftConfig, fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    if scaling is not None:  # exactly two keys, or their loader refuses it
        scaling = {"type": scaling["type"], "factor": scaling["factor"]}
    fields = {k: v for k, v in fields.items() if k not in ("rope_parameters", "attention_bias")}
    fields["rope_scaling"] = scaling
    fields["written_by"] = "gto-hf"  # EAGLE's decoder uses `rope_theta`, its trainer does not: here both mean the same
    if config.draft_type == "eagle3":
        fields["draft_vocab_size"] = config.draft_vocab_size
        if config.own_embeddings:  # its presence is what makes them keep the stored embedding
            fields["target_hidden_size"] = config.target_hidden_size
        return fields
    fields["bias"] = bool(getattr(config, "fc_bias", False)) or config.draft_type == "griffin"
    if config.attention_bias:
        fields["qkv_bias"] = True
    return fields


def _engine_fields(config: DraftConfig) -> dict[str, Any]:
    """What vLLM and SGLang both read of an EAGLE-3 head."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.feature_layers),
    }


def _sglang(config: DraftConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Layer ids are those of the layers whose output is read, one less than ours."""
    if config.draft_type == "eagle":
        return fields | {"architectures": ["LlamaForCausalLMEagle"]}
    nested: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": [k - 1 for k in config.feature_layers],
        "use_aux_hidden_state": True,
    }
    # A false `norm_output` is left out: SpecForge's readers of this format take the field for the norm before the head.
    flags = {n: True for n in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, n, False)}
    if "norm_before_fc" in flags:
        nested["norm_before_fc"] = True
    return (
        fields
        | _engine_fields(config)
        | flags
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": nested,
        }
    )


def _vllm(config: DraftConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Layer ids are `hidden_states` indices, as ours, and stand at the top level, which is read first."""
    if config.draft_type == "eagle":
        return fields
    normed = bool(getattr(config, "qk_norm", False))
    before = bool(getattr(config, "norm_before_fc", False))
    return (
        fields
        | _engine_fields(config)
        | _norms(config)
        | {
            "architectures": ["Eagle3Qwen3ForCausalLM" if normed else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if normed else "llama",
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": before},
        }
    )


def _norms(config: DraftConfig) -> dict[str, bool]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: bool(getattr(config, name, False)) for name in names}


def _speculators(
    config: DraftConfig,
    fields: dict[str, Any],
    dtype: str,
    verifier: str | None,
    verifier_architectures: list[str],
    speculative_tokens: int,
) -> dict[str, Any]:
    """Flags and layer ids at the top, the layer in a config of its own, and what vLLM needs to serve the folder alone."""
    if getattr(config, "qk_norm", False):
        fields = fields | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    trained = fields.pop("trained_length")
    # vLLM counts the features by this field, and takes it from the layer's config.
    fields["num_aux_hidden_states"] = len(config.feature_layers)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        **_norms(config),
        "embed_requires_grad": False,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "trained_length": trained,
        "transformer_layer_config": fields,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }
