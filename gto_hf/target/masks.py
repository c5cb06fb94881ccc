# SPDX-License-Identifier: Apache-2.0
"""Attention masks for tree nodes on top of a KV cache, in the form each attention backend wants. Level 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .describe import text_config, unwrap


@dataclass(frozen=True)
class LayerKind:
    """
    What the layers of one type see of the past.

    Attributes:
        window (`int`, *optional*): Only the last `window` tokens, the query's own included.
        chunk (`int`, *optional*): Only tokens of the query's own chunk of this many.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether these layers see the whole past."""
        return self.window is None and self.chunk is None


def layer_kinds(target: nn.Module) -> dict[str | None, LayerKind]:
    """
    Kinds of attention in a target by layer type; the one key is None if it takes one mask for all layers.

    The rule is that of transformers' `create_masks_for_generate`: a config with `layer_types` takes a mask per type.
    """
    config = text_config(target)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return {None: LayerKind(window=window, chunk=chunk if window is None else None)}
    known = {"sliding_attention": LayerKind(window=window), "chunked_attention": LayerKind(chunk=chunk)}
    return {name: known.get(name, LayerKind()) for name in sorted(set(types))}


def visible_by_kind(kind: LayerKind, visible: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """
    Narrow a visibility mask to what layers of `kind` see, by token index and not by cache slot: siblings share one.

    Args:
        visible (`torch.BoolTensor` of shape `(B, Q, KV)`): What full attention sees.
        queries (`torch.LongTensor` of shape `(B, Q)`), keys (`(B, KV)`): Index of each token in its text, from its first
            token that is not padding.
    """
    if kind.window is not None:
        visible = visible & (keys[:, None] > queries[..., None] - kind.window)
    if kind.chunk is not None:
        visible = visible & (keys[:, None] // kind.chunk == queries[..., None] // kind.chunk)
    return visible


def backend_form(target: nn.Module, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    A boolean mask `(B, Q, KV)` as an unmodified target takes it, `(B, 1, Q, KV)`.

    transformers hands a 4-D mask on as it is: sdpa wants booleans, eager adds floats to the scores.

    Raises:
        ValueError: If the attention backend takes no such mask.
    """
    check_backend(target)
    mask = visible[:, None]
    if text_config(target)._attn_implementation == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def check_backend(model: nn.Module) -> None:
    """Raise `ValueError` if a model's attention backend takes no tree mask."""
    backend = text_config(model)._attn_implementation
    if backend not in ("sdpa", "eager"):
        raise ValueError(
            f"{type(unwrap(model)).__name__} uses `attn_implementation={backend!r}`, which takes no tree mask. Load it with "
            '`attn_implementation="sdpa"` (or call `model.set_attn_implementation("sdpa")`).'
        )


def backend_mask(
    target: nn.Module,
    visible: torch.Tensor,
    dtype: torch.dtype,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor | dict:
    """
    Turn a visibility mask over a whole cache into what an unmodified target takes as `attention_mask`.

    Args:
        target (`PreTrainedModel`): Read for its attention backend and layer types.
        visible (`torch.BoolTensor` of shape `(B, Q, KV)`): True where query `q` may see key `k` in full attention.
        dtype (`torch.dtype`): Compute dtype of the target, for eager.
        queries, keys (`torch.LongTensor`, *optional*): See [`visible_by_kind`]; needed by targets with windows.

    Returns:
        One mask, or one per layer type for targets with `layer_types`.
    """
    masks = {}
    for name, kind in layer_kinds(target).items():
        seen = visible if kind.is_full else visible_by_kind(kind, visible, queries, keys)
        masks[name] = backend_form(target, seen, dtype)
    return masks.get(None, masks)


@contextmanager
def tree_attention(target: nn.Module) -> Iterator[None]:
    """
    Within this context the target attends in a way that takes a tree mask.

    Flash and flex attention take none. Keys and values look the same for all of them, so sdpa (or eager, where a model
    has no sdpa) reads the cache that they wrote. What was set before is restored.
    """
    model, config = unwrap(target), text_config(target)
    before = config._attn_implementation
    if before in ("sdpa", "eager"):
        yield
        return
    config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    try:
        yield
    finally:
        config._attn_implementation = before
