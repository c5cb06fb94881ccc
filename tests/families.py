# SPDX-License-Identifier: Apache-2.0
"""
One tiny random model of every architecture whose compatibility is promised, built from configs; nothing is downloaded.

Tests loop over `FAMILIES` to check that tree decoding, its chain fallback and its refusals do what the compatibility
table says. All models are float32, in evaluation mode and on the CPU, with a vocabulary of 64 (the models that read
images have a few more ids, which stand for image patches and are never written). The random weights are large, so that
the text depends on the whole prompt, and the output head is sharpened, so that greedy choices are decisive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)


VOCAB = 64
WINDOW = 8
CHUNK = 16
SHARPNESS = 8.0
BOS, EOS, PAD = 1, 2, 0
IMAGE_TOKEN, IMAGE_START, IMAGE_END, VIDEO_TOKEN = range(VOCAB, VOCAB + 4)
IMAGE_VOCAB = VOCAB + 8
IMAGE_TOKENS = 4  # placeholders of the one tiny image

# A config takes those of these fields that its class declares.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    "shared_expert_intermediate_size": 16,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_mtp_layers": 0,
}
# Where the common choice writes one token over and over, or rounding errors grow large (Gemma 4).
_SEEDS: dict[str, dict[str, Any]] = {
    "phi": {"seed": 5},
    "gpt_neox": {"seed": 3, "initializer_range": 0.3},
    "gpt2": {"seed": 1, "initializer_range": 0.3},
    "opt": {"seed": 6, "init_std": 0.3},
    "biogpt": {"seed": 3},
    "nemotron": {"seed": 4},
    "qwen2": {"seed": 4, "initializer_range": 0.3},
    "qwen3_moe": {"seed": 4, "initializer_range": 0.3},
    "gptj": {"seed": 2},
    "codegen": {"seed": 0, "initializer_range": 0.3},
    "falcon": {"seed": 2},
    "starcoder2": {"seed": 2, "initializer_range": 0.3},
    "gemma2": {"seed": 5, "initializer_range": 0.3},
    "falcon_alibi": {"seed": 0, "initializer_range": 0.3},
    "gemma4_text": {"seed": 3, "initializer_range": 0.1},
    "mpt": {"seed": 7, "initializer_range": 0.3},
}
_SLIDING_FULL = ["sliding_attention", "full_attention"] * 4
_LINEAR_FULL = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
_LINEAR_SIZES = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _LINEAR_FULL,
}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}


@dataclass(frozen=True)
class Family:
    """
    A row of the compatibility table.

    Attributes:
        name (`str`): Key in `FAMILIES`.
        build (`Callable`): Makes the same model at every call, from a config object of its own. `build(attention=...)`
            asks for an attention implementation; some families (Falcon) cannot change it later.
        route (`str`): `"tree"`, `"chain"` or `"refused"`.
        attention (`tuple[str, ...]`): Implementations that the model offers, of `"sdpa"` and `"eager"`.
        extra (`dict`): `window` or `chunk` where some layers see only so many positions, `experts`, `kv_sharing`, and
            `images` for models that read them (see [`image_inputs`]).
    """

    name: str
    build: Callable[..., PreTrainedModel]
    route: str = "tree"
    attention: tuple[str, ...] = ("sdpa", "eager")
    extra: dict[str, Any] = field(default_factory=dict)


def prompt(rows: int = 1, length: int = 12, *, seed: int = 0) -> torch.Tensor:
    """Random ids `(rows, length)` without special tokens and image placeholders."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def image_inputs(family: Family, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Keyword arguments of `generate`: one row of text around one tiny random image, and its attention mask."""
    generator = torch.Generator().manual_seed(1)
    text = prompt(1, 12, seed=2)[0].tolist()
    ids = [BOS, *text[:4], IMAGE_START, *[IMAGE_TOKEN] * IMAGE_TOKENS, IMAGE_END, *text[4:]]
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    kinds = (input_ids == IMAGE_TOKEN).long()
    vision = model.config.vision_config
    if family.extra["images"] == "grid":  # patches in a row, with their grid
        side = 2 * vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(side * side, width, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]])
        inputs["mm_token_type_ids"] = kinds
        return inputs
    inputs["pixel_values"] = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
    if family.extra["images"] == "bidirectional":  # the patches of an image see each other
        inputs["token_type_ids"] = kinds
    return inputs


def _config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny config of a type; `overrides` win over the common sizes."""
    kind = CONFIG_MAPPING[model_type]
    known = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in _COMMON.items() if name in known} | overrides)


def _finish(model: PreTrainedModel) -> PreTrainedModel:
    """Spread the logits, and keep the ids above the text's vocabulary from being written."""
    head = model.get_output_embeddings().weight.data
    head *= SHARPNESS
    head[VOCAB:] = 0
    return model.float().eval()


def _causal(
    model_type: str, *, seed: int = 0, experts: bool = False, attention: str | None = None, **overrides: Any
) -> PreTrainedModel:
    """A decoder-only model."""
    torch.manual_seed(seed)
    known = {f.name for f in fields(CONFIG_MAPPING[model_type])}
    sizes = {name: value for name, value in _EXPERTS.items() if name in known} if experts else {}
    config = _config(model_type, **sizes | overrides)
    return _finish(AutoModelForCausalLM.from_config(config, attn_implementation=attention))


def _t5(attention: str | None = None) -> PreTrainedModel:
    """An encoder-decoder; its head is always the embedding, so it stays as it is."""
    torch.manual_seed(0)
    config = _config("t5", decoder_start_token_id=PAD)
    return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention).float().eval()


def _gemma3(attention: str | None = None) -> PreTrainedModel:
    """Gemma 3 with a SigLIP tower: 16 patches pooled to 4 tokens."""
    torch.manual_seed(0)
    text = _config(
        "gemma3_text",
        vocab_size=IMAGE_VOCAB,
        sliding_window=WINDOW,
        layer_types=_SLIDING_FULL,
        query_pre_attn_scalar=8,
    )
    vision = _tower("siglip_vision_model", patch_size=4, vision_use_head=False)
    config = CONFIG_MAPPING["gemma3"](
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
        image_token_index=IMAGE_TOKEN,
        initializer_range=0.2,
        tie_word_embeddings=False,
        **_special(),
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    projector = model.model.multi_modal_projector.mm_input_projection_weight.data  # zeros in a fresh model
    projector.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return _finish(model)


def _qwen2_5_vl(attention: str | None = None) -> PreTrainedModel:
    """Qwen2.5-VL: 16 patches merged to 4 tokens, positions with three axes."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = _config("qwen2_5_vl_text", vocab_size=IMAGE_VOCAB, rope_parameters=rope)
    vision = CONFIG_MAPPING["qwen2_5_vl"].sub_configs["vision_config"](
        depth=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        patch_size=4,
        window_size=16,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
    )
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
        tie_word_embeddings=False,
        **_special(),
    )
    return _finish(AutoModelForImageTextToText.from_config(config, attn_implementation=attention))


def _llava(attention: str | None = None) -> PreTrainedModel:
    """LLaVA: a CLIP tower with 4 patches in front of a Llama."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llava"](
        text_config=_config("llama", vocab_size=IMAGE_VOCAB),
        vision_config=_tower("clip_vision_model", patch_size=8),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
        **_special(),
    )
    return _finish(AutoModelForImageTextToText.from_config(config, attn_implementation=attention))


def _tower(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A vision tower for images of 16 by 16 pixels."""
    return CONFIG_MAPPING[model_type](
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        **overrides,
    )


def _special() -> dict[str, int]:
    """Special token ids, which the outer config of a model that reads images repeats."""
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def _row(
    name: str,
    model_type: str,
    route: str = "tree",
    attention: tuple[str, ...] = ("sdpa", "eager"),
    extra: dict[str, Any] | None = None,
    **fields_: Any,
) -> Family:
    """A decoder-only family; `fields_` are those of its config."""
    build = partial(_causal, model_type, **fields_ | _SEEDS.get(name, {}))
    return Family(name, build, route, attention, extra or {})


def _full() -> list[Family]:
    """Every layer sees the whole sequence."""
    plain = ("llama", "qwen3", "phi3", "glm4", "smollm3", "granite", "stablelm", "phi", "ernie4_5", "seed_oss")
    plain += ("nemotron", "gpt2", "gpt_neox", "gpt_bigcode", "opt", "biogpt")
    moe = {
        "mixtral": {},
        "qwen3_moe": {},
        "glm4_moe": {},
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "minimax_m2": {},
    }
    rows = [_row(name, name) for name in plain]
    rows += [_row(name, name, extra={"experts": 4}, experts=True, **sizes) for name, sizes in moe.items()]
    rows += [_row(name, name, rotary_dim=4, pad_token_id=PAD) for name in ("gptj", "codegen")]
    rows.append(_row("falcon", "falcon", multi_query=False))
    rows.append(_row("mistral_full", "mistral", sliding_window=None))
    return rows


def _windowed() -> list[Family]:
    """Some layers see a window or a chunk."""
    window = {"sliding_window": WINDOW}
    mixed = window | {"layer_types": _SLIDING_FULL}
    sizes = {
        "mistral": window,
        "phi3": window,
        "starcoder2": window,
        "qwen2": window | {"use_sliding_window": True, "max_window_layers": 4},
        "olmo3": mixed,
        "cohere2": mixed | {"logit_scale": 1.0},
        "exaone4": mixed,
        "gemma3_text": mixed | {"query_pre_attn_scalar": 8},
    }
    rows = [
        _row("phi3_sliding" if kind == "phi3" else kind, kind, extra={"window": WINDOW}, **values)
        for kind, values in sizes.items()
    ]
    llama4 = {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": CHUNK,
    }
    softcap = {"window": WINDOW, "softcap": True}
    yarn = mixed | {"max_position_embeddings": 131072}  # what its rotary factor is made for
    sinks = {"window": WINDOW, "experts": 4, "sinks": True}
    sharing = {"window": WINDOW, "kv_sharing": 4}
    rows += [
        _row("llama4_text", "llama4_text", extra={"chunk": CHUNK, "experts": 4}, experts=True, **llama4),
        _row("gemma2", "gemma2", attention=("eager",), extra=softcap, query_pre_attn_scalar=8, **mixed),
        _row("gpt_oss", "gpt_oss", attention=("eager",), extra=sinks, experts=True, **yarn),
        _row("gemma4_text", "gemma4_text", extra={"window": WINDOW}, **mixed, **_PER_LAYER),
        _row("gemma4_text_shared", "gemma4_text", extra=sharing, num_kv_shared_layers=4, **mixed, **_PER_LAYER),
        _row(
            "gemma3n_text",
            "gemma3n_text",
            extra=sharing,
            num_kv_shared_layers=4,
            laurel_rank=8,
            **mixed,
            **_PER_LAYER,
        ),
    ]
    return rows


def _multimodal() -> list[Family]:
    """Language models inside a wrapper that also reads images; `images` says in which form."""
    return [
        Family("gemma3", _gemma3, extra={"window": WINDOW, "images": "bidirectional"}),
        Family("qwen2_5_vl", _qwen2_5_vl, extra={"images": "grid"}),
        Family("llava", _llava, extra={"images": "pixels"}),
    ]


def _chains() -> list[Family]:
    """No mask can describe a tree, but drafted tokens can be taken back."""
    local = {"attention_types": [[["global", "local"], 4]], "window_size": WINDOW}
    lfm2 = {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False}
    return [
        _row("bloom", "bloom", "chain", ("eager",), {"alibi": True}),
        _row("falcon_alibi", "falcon", "chain", extra={"alibi": True}, alibi=True, multi_query=False),
        _row("gpt_neo", "gpt_neo", "chain", ("eager",), {"window": WINDOW}, **local),
        _row("lfm2", "lfm2", "chain", extra={"conv": True}, **lfm2),
    ]


def _refused() -> list[Family]:
    """Drafted tokens cannot be taken back, or the model is no decoder-only one."""
    bamba = {
        "attn_layer_indices": [3, 7],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    }
    jamba = {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8}
    nemotron_h = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "num_hidden_layers": None,
    }
    stateful = {"stateful": True}
    return [
        _row("mpt", "mpt", "chain", ("eager",), {"alibi": True}, use_cache=True),
        _row("qwen3_next", "qwen3_next", "refused", extra=stateful, experts=True, **_LINEAR_SIZES),
        _row("qwen3_5_text", "qwen3_5_text", "refused", extra=stateful, **_LINEAR_SIZES),
        _row("bamba", "bamba", "refused", extra=stateful, **bamba),
        _row("mamba", "mamba", "refused", (), stateful, state_size=8),
        _row("jamba", "jamba", "refused", extra=stateful, experts=True, **jamba),
        _row("nemotron_h", "nemotron_h", "refused", extra=stateful, **nemotron_h),
        Family("t5", _t5, "refused", extra={"encoder_decoder": True}),
    ]


FAMILIES: dict[str, Family] = {
    family.name: family for family in (*_full(), *_windowed(), *_multimodal(), *_chains(), *_refused())
}
