# SPDX-License-Identifier: Apache-2.0
"""
The target's KV cache: which one can hold trees, and keeping the accepted paths in it. Level 4.

Column `c` of the cache belongs to column `c` of the sequences, in every row: the accepted rows of a sequence are moved
right behind its last token, so ragged rows leave no holes and a finished call leaves the cache that stock generation
leaves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer


def prepare_cache(
    target: Any, cache: Any, *, rows: int, columns: int, nodes: int, chain: bool
) -> tuple[Cache, Callable[[], None]]:
    """
    The cache to decode with: the given one where drafted tokens can be removed from it again.

    Args:
        target (`PreTrainedModel`): The model the cache is for.
        cache (`Cache`): What `generate` made or the user passed.
        rows (`int`): Sequences of the batch. columns (`int`): Of the finished text. nodes (`int`): Drafted tokens of a
            round. chain (`bool`): No trees.

    Returns:
        The cache, and what puts exchanged layers back once decoding is over.

    Raises:
        ValueError: If drafted tokens cannot be removed from it and it is the user's, or a quantized one.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"Drafts need a KV cache that can drop rejected tokens, got {type(cache).__name__}. Leave "
            "`cache_implementation` and `use_cache` unset."
        )
    own = not getattr(cache, "_is_user_defined", False)
    if isinstance(cache, StaticCache):
        if rows > 1 and not own and cache.get_max_length() < columns:
            raise ValueError(
                f"A batch of {rows} needs a static cache of `max_cache_len={columns}` or more with a draft (one column beyond "
                f"the longest row's), got {cache.get_max_length()}."
            )
        cache = _static(target, cache, own, nodes)
    elif type(cache) is not DynamicCache:
        raise ValueError(
            f"Drafts need a cache that can drop rejected tokens; {type(cache).__name__} cannot. Leave "
            "`cache_implementation` unset, or omit `assistant_model`."
        )
    if isinstance(cache, DynamicCache):
        if any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers):
            raise ValueError("Drafts do not support the cache of indexed (sparse) attention. Omit `assistant_model`.")
        if rows > 1 and not chain:
            return cache, _keep_windows_whole(cache)
    return cache, lambda: None


def _static(target: Any, cache: StaticCache, own: bool, nodes: int) -> Cache:
    """A static cache with room for a tree, or a dynamic one where a static one cannot roll back."""
    if not cache.is_croppable:
        if not own:
            raise ValueError(
                "This static cache has sliding-window layers shorter than the text, from which drafted tokens cannot be "
                "removed. Pass a `DynamicCache`, or none."
            )
        warnings.warn(
            "A static cache cannot roll back sliding-window layers, so a `DynamicCache` replaces it; the text is the same."
        )
        return DynamicCache(config=target.config)
    if not own or cache.is_initialized:
        return cache
    roomy = StaticCache(
        config=target.config,
        max_cache_len=cache.get_max_length() + nodes,
        offloading=cache.offloading,
        offload_only_non_sliding=getattr(cache, "only_non_sliding", True),
    )
    # With the tree a text may no longer fit in a window that it fitted in alone.
    return roomy if roomy.is_croppable else DynamicCache(config=target.config)


def _has_evicted(layer: DynamicSlidingWindowLayer) -> bool:
    return layer.is_initialized and layer.cumulative_length > layer.keys.shape[-2]


def _keep_windows_whole(cache: DynamicCache) -> Callable[[], None]:
    """
    Let layers with a window keep everything: rows of different length need different windows of the same columns.

    Raises:
        ValueError: If the cache was used before and has already dropped what a shorter row would need.
    """
    exchanged: list[tuple[int, DynamicSlidingWindowLayer]] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicSlidingWindowLayer):
            continue
        if _has_evicted(layer):
            raise ValueError(
                "This cache has dropped tokens outside its sliding window, so a batch cannot go on from it with a draft: "
                "rows advance at their own speed. Continue one row at a time, or omit `assistant_model`."
            )
        whole = DynamicLayer()
        if layer.is_initialized:
            whole.update(layer.keys, layer.values)
        cache.layers[index] = whole
        exchanged.append((index, layer))

    def restore() -> None:
        for index, layer in exchanged:
            whole = cache.layers[index]
            if whole.is_initialized:
                layer.reset()
                layer.update(whole.keys, whole.values)  # keeps its window
            cache.layers[index] = layer

    return restore


def room_in(cache: Cache, columns: int) -> int | None:
    """Columns that a cache of `columns` tokens can still take; None if it grows."""
    longest = cache.get_max_length() if isinstance(cache, StaticCache) else -1
    return None if longest < 0 else longest - columns


def keep_path(cache: Cache, path: list[int], size: int, end: int) -> None:
    """
    Of the last `size` columns of a one-row cache keep those in `path`, in order, and drop the rest.

    Args:
        cache (`Cache`): Ends with the `size` columns of a tree. Changed in place.
        path (`list[int]`): Ascending columns of the tree, root (0) first.
        size (`int`): Nodes of the tree, root included. end (`int`): Columns of the cache, the tree's included.
    """
    kept = len(path)
    if path != list(range(kept)):
        indices: dict[torch.device, torch.Tensor] = {}
        for layer in cache.layers:
            if getattr(layer, "keys", None) is None:
                continue  # shares another layer's keys
            device = layer.keys.device
            index = indices.setdefault(device, torch.tensor(path, device=device))
            start = (end if isinstance(layer, StaticLayer) else layer.keys.shape[-2]) - size
            for states in (layer.keys, layer.values):
                rows = states[..., start : start + size, :]
                rows[..., :kept, :] = rows.index_select(-2, index)
    cache.crop(kept - size)


def keep_paths(cache: Cache, paths: list[list[int]], lengths: list[int], size: int) -> None:
    """
    The same for a batch: the columns of each row's path move right behind that row's last token.

    Args:
        cache (`Cache`): Row `r` holds `lengths[r]` tokens; the `size` columns of the trees follow the longest row.
        paths (`list[list[int]]`): Per row, ascending columns of its tree, root first; empty for rows that are done.
        lengths (`list[int]`): Tokens of each row before. size (`int`): Nodes of the trees, root included.
    """
    start = max(lengths)
    most = max(len(path) for path in paths)
    longest = max(length + len(path) for length, path in zip(lengths, paths, strict=True))
    if most:
        source, goal = [], []
        for length, path in zip(lengths, paths, strict=True):
            # Rows with a shorter path repeat their last move; rows with none copy a token onto itself.
            moves = [(start + column, length + i) for i, column in enumerate(path)] or [(length - 1, length - 1)]
            moves += [moves[-1]] * (most - len(moves))
            source.append([m[0] for m in moves])
            goal.append([m[1] for m in moves])
        table = torch.tensor([source, goal])
        for layer in cache.layers:
            if getattr(layer, "keys", None) is None:
                continue
            here = table.to(layer.keys.device)[:, :, None, :, None]
            for states in (layer.keys, layer.values):
                shape = (-1, states.shape[1], -1, states.shape[-1])
                states.scatter_(2, here[1].expand(shape), states.gather(2, here[0].expand(shape)))
    cache.crop(longest - start - size)
