# SPDX-License-Identifier: Apache-2.0
"""Attention masks for tree nodes on top of a KV cache, in the form each attention backend wants. Level 1."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from .describe import text_config, unwrap


def backend_mask(target: nn.Module, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | dict:
    """
    Turn a visibility mask into what an unmodified target takes as `attention_mask`.

    transformers hands a 4-D mask on as it is: sdpa wants booleans, eager adds floats to the scores. Models with
    `layer_types` take one mask per type.

    Args:
        target (`PreTrainedModel`): Read for its attention backend and layer types.
        visible (`torch.BoolTensor` of shape `(B, Q, KV)`): True where query `q` may see key `k`.
        dtype (`torch.dtype`): Compute dtype of the target, for eager.

    Raises:
        ValueError: If the attention backend takes no such mask.
    """
    config = text_config(target)
    backend = config._attn_implementation
    mask: torch.Tensor = visible[:, None]
    if backend == "eager":
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    elif backend != "sdpa":
        raise ValueError(
            f"The target uses `attn_implementation={backend!r}`, which takes no tree mask. Load it with "
            '`attn_implementation="sdpa"` (or call `model.set_attn_implementation("sdpa")`).'
        )
    layer_types = getattr(config, "layer_types", None)
    return mask if layer_types is None else dict.fromkeys(set(layer_types), mask)


def check_tree_support(target: nn.Module) -> None:
    """
    Refuse targets whose attention a tree mask cannot describe, before any forward.

    Raises:
        ValueError: For encoder-decoder and stateful targets, for sliding-window, chunked or linear-attention layers,
            for targets without `position_ids` (ALiBi, in-module local attention) and for other attention backends.
    """
    model, config = unwrap(target), text_config(target)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"Draft trees need a decoder-only target; {name} is an encoder-decoder. Call `generate` without "
            "`assistant_model`."
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back, so drafted tokens cannot be rejected. Call "
            "`generate` without `assistant_model`."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # With `layer_types` a leftover `sliding_window` means nothing unless some layer is of that type.
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or window is not None:
        found = ", ".join(sorted(kinds - {"full_attention"})) or f"sliding_window={window}"
        raise ValueError(
            f"{name} has layers that do not attend to the whole sequence ({found}); draft trees support full attention "
            "only. Call `generate` without `assistant_model`."
        )
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"{name} has cross-attention layers, which draft trees do not support. Call `generate` without "
            "`assistant_model`."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{name} takes no `position_ids`, so sibling nodes cannot share a position. Call `generate` without "
            "`assistant_model`."
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} is not known to honour a tree mask (`_supports_attention_backend` is false). Call `generate` "
            "without `assistant_model`."
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        backend_mask(target, torch.ones(1, 1, 1, dtype=torch.bool), torch.float32)
