# SPDX-License-Identifier: Apache-2.0
"""
What can be read from an unchanged target without a forward: sizes, fingerprint, embedding, head and final norm.

Level 1. Works through public accessors (`get_text_config`, `get_input_embeddings`, ..), never through key names, so
multimodal wrappers and PEFT models are read like plain ones.
"""

from __future__ import annotations

import hashlib
import os
import re
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper (its adapters stay active), or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(target: nn.Module) -> PreTrainedConfig:
    """Configuration of the language model, also for multimodal wrappers."""
    return unwrap(target).config.get_text_config()


def fingerprint(target: nn.Module) -> dict[str, Any]:
    """
    What identifies a target, as stored in a draft's `config.target`.

    Returns:
        `dict`: `name_or_path` and `revision` (who it says it is; local paths are kept out, they mean nothing
        elsewhere), sizes (what must fit), and `quantization` (features change with it).
    """
    return config_fingerprint(unwrap(target).config)


def config_fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """[`fingerprint`] of a target of which only the config is at hand."""
    text = config.get_text_config()
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):  # as it stands in a file
        quantization = SimpleNamespace(**quantization)
    method = getattr(quantization, "quant_method", None)
    name = config._name_or_path
    return {
        "name_or_path": None if not name or _is_local(name) else name,
        "revision": getattr(config, "_commit_hash", None),
        "model_type": text.model_type,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "quantization": None if method is None else str(getattr(method, "value", method)),
    }


def weights_hash(model: nn.Module) -> str:
    """
    A hash of the first numbers of every parameter: tells models apart, and a model from its fine-tuned self. Of weights that
    are elsewhere (offloaded) only name and shape count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel():
            some = parameter.detach().reshape(-1)[:64].cpu().contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_hub_id(name: str | None) -> bool:
    """Whether a target's name can be loaded from the Hub; a fingerprint may also hold a plain description."""
    return name is not None and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def _is_local(name: str) -> bool:
    """Whether a name is a folder of this machine rather than a Hub id."""
    return name.startswith((".", "/", "~")) or "\\" in name or os.path.isdir(name)


def position_limit(target: nn.Module) -> int | None:
    """
    First position at which a forward over drafted nodes would no longer equal one-token forwards; None if there is none.

    Either the end of a learned or tabled position embedding, or the length at which a rotary embedding changes its
    frequencies for the whole forward (`dynamic`, `longrope`).
    """
    config = text_config(target)
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return getattr(config, "max_position_embeddings", None)
    kinds = rope_types(target)
    if "longrope" in kinds:
        return getattr(config, "original_max_position_embeddings", None) or rope.get(
            "original_max_position_embeddings"
        )
    if any("dynamic" in kind for kind in kinds):
        return config.max_position_embeddings
    return None


def rope_types(target: nn.Module) -> set[str]:
    """Kinds of rotary embedding of a target: one, or one per layer type."""
    rope = getattr(text_config(target), "rope_parameters", None) or {}
    flat = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in flat if "rope_type" in each}


def default_feature_layers(num_hidden_layers: int) -> list[int]:
    """
    EAGLE-3's three `hidden_states` indices `(2, n // 2, n - 3)`: a low, a middle and a high boundary.

    Raises:
        ValueError: For targets of fewer than 7 layers, where the rule gives repeated or descending indices.
    """
    layers = [2, num_hidden_layers // 2, num_hidden_layers - 3]
    if sorted(set(layers)) != layers:
        raise ValueError(
            f"EAGLE-3's feature layers (2, n // 2, n - 3) are {tuple(layers)} for a target of {num_hidden_layers} "
            "layers: repeated or out of order. Name them yourself, for example `feature_layers=[1, 2]`."
        )
    return layers


def boundary_features(hidden_states: tuple[torch.Tensor, ...], layers: list[int]) -> torch.Tensor:
    """
    The boundaries a draft reads, concatenated low to high and gathered on one device: `(B, F, len(layers) * H)`.

    Args:
        hidden_states (`tuple[torch.Tensor]`): As a target returns them, each `(B, F, H)`. Targets with parallel streams
            (Gemma 3n) give `(streams, B, F, H)`; the first one carries the text.
        layers (`list[int]`): Indices into them.
    """
    states = [hidden_states[i] if hidden_states[i].ndim == 3 else hidden_states[i][0] for i in layers]
    return torch.cat([s.to(states[-1].device) for s in states], dim=-1)


def embed_raw(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Rows of an embedding as stored. Some targets (Gemma) scale inside the module; published drafts read the raw rows.
    """
    input_ids = input_ids.to(embedding.weight.device)
    if type(embedding).forward is nn.Embedding.forward:
        return embedding(input_ids)  # as a module, so that sharding hooks see the call
    return F.embedding(input_ids, embedding.weight)


def embedding_scale(embedding: nn.Module) -> float:
    """Factor between what an embedding module returns and its stored rows (Gemma's is not 1)."""
    if type(embedding).forward is nn.Embedding.forward:
        return 1.0
    with torch.no_grad():
        row = torch.arange(min(8, len(embedding.weight)), device=embedding.weight.device)[None]  # one may be zero
        made, raw = embedding(row).float(), F.embedding(row, embedding.weight).float()
    norm = float(raw.norm())
    return float(made.norm()) / norm if norm > 0 else 1.0


def final_norm(target: PreTrainedModel) -> nn.Module | None:
    """The norm that stands last in the target's decoder; None if it has none."""
    decoder = unwrap(target)
    decoder = decoder.get_decoder() if hasattr(decoder, "get_decoder") else decoder.base_model
    norms = [m for name, m in decoder.named_children() if "norm" in type(m).__name__.lower()]
    return norms[-1] if norms else None


def final_norm_scale(target: PreTrainedModel) -> torch.Tensor | None:
    """
    Effective weight `(H,)` of the target's last RMS norm, or None when it has no such norm.

    An RMS norm maps a vector of ones to its own scale, whether it stores `w` or, as Gemma, `w - 1`.
    """
    norm = final_norm(target)
    if norm is None:
        return None
    width, weight = text_config(target).hidden_size, next(norm.parameters(), None)
    if weight is None or weight.numel() != width:
        return None
    with torch.no_grad():
        scale = norm(torch.ones(1, 1, width, dtype=weight.dtype, device=weight.device)).flatten()
    return scale if bool(scale.abs().max() > 0) else None  # a LayerNorm maps ones to its bias
