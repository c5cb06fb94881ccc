# SPDX-License-Identifier: Apache-2.0
"""
A tiny checkpoint in every spelling of EAGLE-3, from tables of names and shapes, with what each of them must compute.

Nothing of the package is used. A checkpoint starts as random weights with SafeAILab's names and plain facts; a spelling is
the names, the config and the storage of one project. The target has 8 layers of width 32 and 64 tokens.
"""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import save_file


LAYERS, WIDTH, VOCAB = 8, 32, 64
NH, NKV, HD, INTER, VD = 4, 2, 8, 48, 24
RULE, OUTPUTS = [2, 4, 5], [1, 3, 4]  # `hidden_states` indices for 8 layers; the same as layers whose output is meant
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INTER,
    "num_attention_heads": NH,
    "num_key_value_heads": NKV,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


def facts(**changes):
    """What a draft computes; EAGLE's own unless changed."""
    plain = {
        "hidden_size": WIDTH, "target_hidden_size": WIDTH, "num_attention_heads": NH, "num_key_value_heads": NKV,
        "head_dim": HD, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "feature_layers": RULE, "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "qk_norm": False, "norm_output": False,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "biases": (), "own_embeddings": False,
        "sorted": True,
    }  # fmt: skip
    assert set(changes) <= set(plain), set(changes) - set(plain)
    return SimpleNamespace(**{**plain, **changes})


def shapes(f):
    """Names, in SafeAILab's spelling, and shapes of all tensors of a draft with these facts, without the map."""
    h, fused = f.hidden_size, len(f.feature_layers) * f.target_hidden_size
    made = {"fc.weight": (h, fused), "norm.weight": (h,), "lm_head.weight": (VD, h)}
    for i in range(f.num_hidden_layers):
        name, reads = ("midlayer", 2 * h) if i == 0 else (f"layers.{i}", h)
        made |= {
            f"{name}.self_attn.q_proj.weight": (f.num_attention_heads * f.head_dim, reads),
            f"{name}.self_attn.k_proj.weight": (f.num_key_value_heads * f.head_dim, reads),
            f"{name}.self_attn.v_proj.weight": (f.num_key_value_heads * f.head_dim, reads),
            f"{name}.self_attn.o_proj.weight": (h, f.num_attention_heads * f.head_dim),
            f"{name}.mlp.gate_proj.weight": (INTER, h),
            f"{name}.mlp.up_proj.weight": (INTER, h),
            f"{name}.mlp.down_proj.weight": (h, INTER),
            f"{name}.input_layernorm.weight": (h,),
            f"{name}.post_attention_layernorm.weight": (h,),
        }
        if f.qk_norm:
            made |= {f"{name}.self_attn.{n}_norm.weight": (f.head_dim,) for n in "qk"}
    made["midlayer.hidden_norm.weight"] = (h,)
    if f.norm_before_fc:
        made["input_norm.weight"] = (fused,)
    if f.fc_norm:
        made |= {f"fc_norm.{i}.weight": (f.target_hidden_size,) for i in range(len(f.feature_layers))}
    for part in f.biases:
        made |= {n.replace(".weight", ".bias"): (s[0],) for n, s in made.items() if n.endswith(f"{part}.weight")}
    if f.own_embeddings:
        made["embed_tokens.weight"] = (VOCAB, h)
    return made


def weights(f, seed=0):
    """Random tensors, and a `d2t` and `t2d` for 24 of the target's tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(f).items():
        noise = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    kept = torch.randperm(VOCAB, generator=generator)[:VD]
    kept = kept.sort().values if f.sorted else kept
    made["d2t"] = kept - torch.arange(VD)
    made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    made["t2d"][kept] = True
    return made


class Spelling:
    """One project's way of writing: config, names, which tensors it leaves out, what only a caller can say."""

    def __init__(
        self, dialect, f, config, *, first="midlayer.", prefix="", drop=(), norms=None, said=None, kind="safetensors"
    ):
        self.dialect, self.facts, self.config, self.said, self.kind = dialect, f, config, said or {}, kind
        self.first, self.prefix, self.drop, self.norms = first, prefix, drop, norms

    def name(self, name):
        """Their name of a tensor."""
        if name in ("d2t", "t2d", "lm_head.weight"):
            return name
        name = name.replace("midlayer.", self.first)
        if self.norms and name.startswith("fc_norm."):
            name = self.norms[int(name.split(".")[1])] + ".weight"
        return self.prefix + name

    def tensors(self, made):
        return {self.name(k): v for k, v in made.items() if k not in self.drop}

    def write(self, folder, made=None, config=None):
        """Write the checkpoint; returns the folder."""
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text(json.dumps(self.config if config is None else config))
        content = self.tensors(weights(self.facts) if made is None else made)
        if self.kind == "bin":
            torch.save(content, folder / "pytorch_model.bin")
        else:
            save_file(content, folder / "model.safetensors")
        return folder

    def listing(self):
        """What a golden file holds: config and the names with their shapes and kinds."""
        made = self.tensors(weights(self.facts))
        return {
            "config": self.config,
            "tensors": {k: [str(v.dtype).removeprefix("torch."), *v.shape] for k, v in sorted(made.items())},
        }


def _eagle3(**fields):
    return LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD} | fields


def _ids(ids=OUTPUTS, **fields):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, **fields}}


def _rope(theta=10000.0, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


def _speculators(layer, **fields):
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VD,
        "transformer_layer_config": LLAMA | {"head_dim": HD} | layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        **fields,
    }


SPELLINGS = {
    "safeailab": Spelling(
        "SafeAILab", facts(sorted=False), LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD}, kind="bin"
    ),
    "safeailab_narrow": Spelling(
        "SafeAILab",
        facts(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, own_embeddings=True),
        LLAMA
        | {"draft_vocab_size": VD, "hidden_size": 16, "target_hidden_size": WIDTH, "num_attention_heads": 2,
           "num_key_value_heads": 1, "rope_theta": 500000.0},
    ),  # fmt: skip
    "truncated": Spelling(
        "SafeAILab",
        facts(rope_parameters=YARN | {"rope_theta": 150000.0}),
        LLAMA | {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": VD, "rope_theta": 150000.0}
        | {"rope_scaling": YARN},
    ),  # fmt: skip
    "specforge_hf": Spelling(
        "SpecForge",
        facts(own_embeddings=True, fc_norm=True, norm_output=True, rope_parameters=_rope(1e6)),
        _eagle3(fc_norm=True, norm_output=True, head_dim=HD, target_hidden_size=WIDTH, rope_theta=1e6, **_ids(),
                rope_parameters=_rope(1e6), rope_scaling=None),
        said={"norm_output": True},
    ),  # fmt: skip
    "specforge_sglang": Spelling(
        "SpecForge",
        facts(rope_parameters=_rope(1e6, partial_rotary_factor=0.25), feature_layers=[2, 4, 5, 7]),
        _eagle3(head_dim=HD, rope_theta=1e6, partial_rotary_factor=0.25, **_ids([1, 3, 4, 6])),
    ),
    "speculators_0": Spelling(
        "speculators",
        facts(own_embeddings=True, norm_before_fc=True, norm_before_residual=True, rope_parameters=_rope(500000.0)),
        _speculators({"rope_theta": 500000.0, "rope_scaling": None}, speculators_version="0.1.0.dev14", norm_before_fc=True),
        first="layers.0.",
    ),
    "speculators_1": Spelling(
        "speculators",
        facts(own_embeddings=True, norm_before_fc=True, norm_before_residual=True, norm_output=True, qk_norm=True,
              num_hidden_layers=2, sliding_window=5, feature_layers=[1, 3, 6], rope_parameters=_rope(1e6)),
        _speculators(
            {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5,
             "use_sliding_window": True, "rope_parameters": _rope(1e6)},
            speculators_version="1.0.0", norm_before_fc=True, norm_before_residual=True, norm_output=True, fc_norm=False,
            eagle_aux_hidden_state_layer_ids=[1, 3, 6], embed_requires_grad=False,
        ),
        first="layers.0.",
    ),  # fmt: skip
    "modelopt": Spelling(
        "ModelOpt",
        facts(sorted=False),
        _eagle3(
            head_dim=HD, rope_scaling=YARN, rope_theta=10000.0, attention_bias=False, mlp_bias=False,
            **_ids(use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False,
                   next_layer_regular=True, parallel_draft_step=1, parallel_draft_heads_num_layers=None),
        ),
        first="layers.0.", drop=("t2d",),
    ),  # fmt: skip
    "angelslim_old": Spelling(
        "AngelSlim",
        facts(),
        LLAMA
        | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VD, "head_dim": HD, "rope_theta": 1000000,
           "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36},
    ),  # fmt: skip
    "angelslim_new": Spelling(
        "AngelSlim",
        facts(feature_layers=[2, 3, 7], own_embeddings=True, rope_parameters=_rope(1e6)),
        LLAMA
        | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VD, "target_model_type": "qwen3", "head_dim": HD,
           "rope_theta": 1000000, "aux_hidden_state_layer_ids": [1, 2, 6], "eagle_aux_hidden_state_layer_ids": [2, 3, 7]},
        first="layers.0.",
    ),  # fmt: skip
    "automodel": Spelling(
        "NeMo Automodel",
        facts(own_embeddings=True, fc_norm=True, norm_output=True, biases=("q_proj", "k_proj", "v_proj", "o_proj",
              "gate_proj", "up_proj", "down_proj"), rope_parameters=_rope(1e6)),
        LLAMA
        | {"architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": VD, "num_hidden_layers": LAYERS, "fc_norm": True,
           "norm_output": True, "attention_bias": True, "mlp_bias": True, "num_aux_hidden_states": 3, "rope_theta": 1e6,
           "rope_parameters": None, "partial_rotary_factor": 1.0, "target_hidden_size": WIDTH},
        first="layers.0.", prefix="model.",
    ),  # fmt: skip
    "sglang_old_norms": Spelling(
        "SGLang", facts(fc_norm=True), _eagle3(), norms=("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    ),
    "sglang": Spelling(
        "SGLang",
        facts(norm_output=True, biases=("fc",)),
        _eagle3(bias=True, norm_output=True, **_ids()),
        first="layers.0.",
    ),
}  # fmt: skip
