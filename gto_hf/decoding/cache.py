# SPDX-License-Identifier: Apache-2.0
"""Keeping the accepted path in the target's KV cache. Level 4."""

from __future__ import annotations

import torch
from transformers import DynamicCache


def keep_path(cache: DynamicCache, path: list[int], size: int) -> None:
    """
    Of the last `size` rows of every layer keep those in `path`, in order, and drop the rest.

    Args:
        cache (`DynamicCache`): Ends with the `size` rows of a tree. Changed in place.
        path (`list[int]`): Ascending columns of the tree, root (0) first.
        size (`int`): Nodes of the tree, root included.
    """
    kept = len(path)
    if path != list(range(kept)):
        for layer in cache.layers:
            index = torch.tensor(path, device=layer.keys.device)
            start = layer.keys.shape[-2] - size
            for states in (layer.keys, layer.values):
                rows = states[..., start:, :]
                rows[..., :kept, :] = rows.index_select(-2, index)
    cache.crop(kept - size)
