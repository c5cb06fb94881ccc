# SPDX-License-Identifier: Apache-2.0
"""
What each engine reads of each draft type: keys, flags, layers, embedding. Level 4, tables only.

Read from the loaders of vLLM 0.32 (`llama_eagle3.py`, `qwen3_eagle3.py`, `llama_eagle.py`), SGLang 0.5.23
(`llama_eagle3.py`, `llama_eagle.py`), speculators and the repositories of EAGLE and GRIFFIN.
"""

from __future__ import annotations

from dataclasses import dataclass


# Fields of a draft's config that change what its tensors mean or which there are. A dialect that does not list one
# cannot say it, and its reader would compute something else without an error.
FLAGS: dict[str, str] = {
    "norm_before_residual": "the residual is the normed feature",
    "norm_before_fc": "one norm over all features before `fc`",
    "fc_norm": "a norm per feature layer before `fc`",
    "norm_output": "the draft feeds on its normed output",
    "fc_bias": "a bias in `fc`",
    "qk_norm": "norms on queries and keys",
    "attention_bias": "biases in the q, k and v projections",
    "attention_output_bias": "a bias in `o_proj`",
    "mlp_bias": "biases in the MLP",
    "layernorms": "norms on an EAGLE draft's embedding and before its head",
    "sliding_window": "attention to the last tokens only",
}
_VLLM = frozenset({"norm_before_residual", "qk_norm", "attention_bias", "attention_output_bias", "sliding_window"})
_NORMS = frozenset({"norm_before_fc", "fc_norm", "norm_output"})

_LAYER = (
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
)
_EAGLE3_LAYER = ("hidden_norm.weight", "input_layernorm.weight", *_LAYER)
_OUTPUT_BIAS = ("self_attn.o_proj.bias",)
_BIASES = ("self_attn.k_proj.bias", "self_attn.q_proj.bias", "self_attn.v_proj.bias")
_QK_NORMS = ("self_attn.k_norm.weight", "self_attn.q_norm.weight")


@dataclass(frozen=True)
class Dialect:
    """
    How one engine reads one draft type.

    Attributes:
        engine, draft_type (`str`): Which. layer (`str`): Prefix of the first layer's keys.
        file (`str`): Name of the weights' file.
        required, first_layer, optional (`tuple[str, ...]`): Keys; `first_layer` without its prefix.
        flags (`frozenset[str]`): Those of `FLAGS` that it can say.
        embedding (`str`): `"target"`: always the target's; `"other width"`: the draft's own only where the widths differ;
            `"optional"`: own if stored; `"stored"`: always stored, a copy if need be.
        layers (`int`, *optional*): Most layers that it reads; None is any number.
        named_features (`bool`): Whether the config says which layers of the target are read; otherwise EAGLE-3's rule.
        free_head_dim (`bool`): Whether `head_dim` may differ from `hidden_size / num_attention_heads`.
        rope_types (`frozenset[str]`): Rotary embeddings that it knows.
        silu_only (`bool`): Whether the activation is fixed.
        joint_bias (`bool`): Whether one field gives biases to q, k, v and o together (without `qk_norm`).
    """

    engine: str
    draft_type: str
    layer: str
    required: tuple[str, ...]
    first_layer: tuple[str, ...]
    optional: tuple[str, ...] = ()
    file: str = "model.safetensors"
    flags: frozenset[str] = frozenset()
    embedding: str = "optional"
    layers: int | None = 1
    named_features: bool = True
    free_head_dim: bool = True
    rope_types: frozenset[str] = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})
    silu_only: bool = True
    joint_bias: bool = False

    def required_keys(self) -> list[str]:
        """Names of all tensors without which the engine cannot load the draft."""
        return sorted([*self.required, *(self.layer + key for key in self.first_layer)])


_SAFEAILAB = {
    "embedding": "other width",
    "free_head_dim": False,
    "named_features": False,
    "rope_types": frozenset({"default", "linear", "dynamic"}),
    "silu_only": False,
}
_EAGLE3 = ("fc.weight", "lm_head.weight", "norm.weight")
_MAP = ("d2t", "t2d")

DIALECTS: dict[tuple[str, str], Dialect] = {
    (d.engine, d.draft_type): d
    for d in (
        Dialect(
            "safeailab",
            "eagle3",
            "midlayer.",
            _EAGLE3,
            _EAGLE3_LAYER,
            (*_MAP, "embed_tokens.weight"),
            **_SAFEAILAB,
        ),
        # `layers` are built by number, but those after the first use `hidden_norm` where everyone else has
        # `input_layernorm`; a bias of `fc` would put an unset one on `o_proj` too.
        Dialect(
            "sglang",
            "eagle3",
            "midlayer.",
            _EAGLE3,
            _EAGLE3_LAYER,
            (*_MAP, "embed_tokens.weight", "input_norm.weight", "fc_norm.*.weight"),
            flags=_NORMS,
            embedding="other width",
        ),
        Dialect(
            "vllm",
            "eagle3",
            "layers.0.",
            _EAGLE3,
            _EAGLE3_LAYER,
            (*_MAP, "embed_tokens.weight", "input_norm.weight", "fc_norm.*.weight"),
            flags=_NORMS | _VLLM,
            joint_bias=True,
            layers=None,
        ),
        Dialect(
            "speculators",
            "eagle3",
            "layers.0.",
            (*_EAGLE3, "embed_tokens.weight"),
            _EAGLE3_LAYER,
            (*_MAP, "input_norm.weight", "fc_norm.*.weight"),
            flags=_NORMS | _VLLM,
            joint_bias=True,
            embedding="stored",
            layers=None,
        ),
        Dialect(
            "safeailab",
            "eagle",
            "layers.0.",
            ("embed_tokens.weight", "fc.weight"),
            _LAYER,
            ("fc.bias",),
            flags=frozenset({"fc_bias", "attention_bias"}),
            **{**_SAFEAILAB, "embedding": "stored"},
        ),
        Dialect(
            "sglang",
            "eagle",
            "layers.0.",
            ("fc.weight", "fc.bias"),
            _LAYER,
            flags=frozenset({"fc_bias"}),
            embedding="target",
        ),
        Dialect("vllm", "eagle", "layers.0.", ("fc.weight",), _LAYER, ("embed_tokens.weight",)),
        Dialect(
            "safeailab",
            "griffin",
            "layers.0.",
            (
                "embed_tokens.weight",
                "fc.fc.weight",
                "fc.fc.bias",
                "fc.post_attention_layernorm.weight",
                "fc.mlp.input_layernorm.weight",
                "fc.mlp.up_proj.weight",
                "fc.mlp.down_proj.weight",
            ),
            _LAYER,
            file="pytorch_model.bin",
            **{**_SAFEAILAB, "embedding": "stored"},
        ),
    )
}

ENGINES: tuple[str, ...] = tuple(dict.fromkeys(engine for engine, _ in DIALECTS))


def optional_layer_keys(dialect: Dialect) -> tuple[str, ...]:
    """Keys of a layer, without prefix, that are there only if a flag says so."""
    keys = {"attention_bias": _BIASES, "attention_output_bias": _OUTPUT_BIAS, "qk_norm": _QK_NORMS}
    return tuple(key for flag, names in keys.items() if flag in dialect.flags for key in names)


def find_dialect(engine: str, draft_type: str) -> Dialect:
    """
    The dialect in which an engine reads a draft type.

    Raises:
        ValueError: If there is no such engine, or it does not read this type.
    """
    if engine not in ENGINES:
        raise ValueError(f"`{engine}` is no engine that drafts are exported to. Choose one of {', '.join(ENGINES)}.")
    found = DIALECTS.get((engine, draft_type))
    if found is not None:
        return found
    if draft_type == "causal_lm":
        raise ValueError(
            f"A `causal_lm` draft is an ordinary language model: save it with `draft.model.save_pretrained(folder)` and "
            f"give that folder to {engine} as its draft model."
        )
    readers = [e for e, t in DIALECTS if t == draft_type]
    known = f"only {', '.join(readers)} can" if readers else "no engine can"
    raise ValueError(f"{engine} cannot load a draft of type `{draft_type}`; {known}.")
