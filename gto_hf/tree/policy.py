# SPDX-License-Identifier: Apache-2.0
"""
The tree policy: expansion, then pruning. Decoding and training both call `grow_trees`; there is no other copy.

Level 0: it sees log-probabilities, token ids and opaque features, never a model or a vocabulary. The policy is
EAGLE-2's (Li et al. 2024, https://huggingface.co/papers/2406.16858, Sec. 4.1), as used by Group Tree Optimization
(Hu et al. 2025, https://huggingface.co/papers/2509.22134, Sec. 2). Slow twin: `tests/reference/naive_tree.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import TreeConfig
from .tree import DraftTree


@dataclass(frozen=True)
class Expansion:
    """
    What a draft says after `F` nodes of each of `R` trees.

    Attributes:
        log_probs (`torch.FloatTensor` of shape `(R, F, k)`): Log-probabilities (nats) of the best `k` next tokens.
        tokens (`torch.LongTensor` of shape `(R, F, k)`): Those tokens, best first, as target-vocabulary ids.
        features (`torch.FloatTensor` of shape `(R, F, H)`): What the draft feeds back to itself below these nodes.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor


# (tokens (R, F), features (R, F, H), ancestors (R, F, S), depth of these tokens) -> Expansion of these F nodes.
# S counts all nodes expanded so far, these F last; `ancestors` is true for a node itself and its ancestors.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Expansion]


class Growth(Protocol):
    """Decides while a tree grows how large it shall be, within the limits of its [`TreeConfig`]."""

    def deeper(self, levels: list[torch.Tensor]) -> bool:
        """Whether to draft one more level, from the path log-probabilities `(R, n)` of each level so far."""

    def nodes(self, levels: list[torch.Tensor], tokens: list[torch.Tensor]) -> int:
        """How many of these nodes to keep, 0 for none; `tokens` `(R, n)` are theirs."""


def stable_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Like `values.topk(k)` on the last dimension, but equal values are ordered (and chosen) by index.

    `torch.topk` may return any of several equal values, so a tree could depend on the device or the batch size.
    Ties are common in half precision. Rows without a tie at the cut take the fast path.
    """
    size = values.shape[-1]
    if not 0 < k <= size:
        raise ValueError(
            f"Cannot take the best {k} of {size} values; a tree's `top_k` must fit the draft's vocabulary."
        )
    best, index = values.topk(min(k + 1, size), dim=-1)
    if size > k:
        tied = best[..., k - 1] == best[..., k]
        best, index = best[..., :k], index[..., :k]
        if tied.any():
            rows, cut = values[tied], best[tied][:, -1:]
            _refuse_nan(rows)
            above, equal = rows > cut, rows == cut
            room = k - above.sum(-1, keepdim=True)
            chosen = above | (equal & (equal.cumsum(-1) <= room))
            index = index.clone()
            index[tied] = chosen.nonzero()[:, 1].view(-1, k)
    index = index.sort(dim=-1).values
    best, order = values.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return best, index.gather(-1, order)


class NotFiniteError(ValueError, FloatingPointError):
    """A draft's scores hold NaN: bad input for a tree, and to a trainer a failure of arithmetic."""


def _refuse_nan(scores: torch.Tensor) -> None:
    if torch.isnan(scores).any():
        raise NotFiniteError(
            "The draft's scores contain NaN, so no tree can be grown. Its weights or the target's features are not "
            "finite: check the checkpoint, and train in bfloat16 or float32 rather than float16."
        )


def grow_trees(
    step: Step, root_tokens: torch.Tensor, root: Expansion, config: TreeConfig, growth: Growth | None = None
) -> DraftTree:
    """
    Grow one draft tree per root, all roots together, one draft forward per level.

    1. The root's `top_k` children. A node's score is the sum of draft log-probabilities along its path.
    2. Level by level: expand the `top_k` frontier nodes, keep the best `top_k` of the `top_k**2` children as the
       next frontier. All scored nodes stay candidates.
    3. Keep the best `total_tokens` candidates of all levels. A parent never scores below its child and stands before
       it, so equal scores, broken by index, cannot orphan a node.

    Args:
        step (`Callable`): One draft forward over the frontier, see [`Step`]. Called `depth - 1` times.
        root_tokens (`torch.LongTensor` of shape `(R,)`): The last known token of each prefix.
        root ([`Expansion`] with `F = 1`): The draft's output at the roots.
        config ([`TreeConfig`]): Depth, branching and size.
        growth ([`Growth`], *optional*): Stops earlier and keeps fewer nodes than `config` allows, the same for all trees.

    Returns:
        [`DraftTree`] of `R` trees with `config.total_tokens` nodes each, or as many as `growth` says.

    Raises:
        ValueError: If the draft's log-probabilities contain NaN, or `root` does not hold `top_k` children.
    """
    rows, _, k = root.log_probs.shape
    if k != config.top_k:
        raise ValueError(f"The root was expanded into {k} children, but the tree needs `top_k={config.top_k}`.")
    device = root.log_probs.device
    scores, tokens = root.log_probs[:, 0], root.tokens[:, 0]
    frontier = torch.arange(1, k + 1, device=device).expand(rows, k)  # candidate number; 0 is the root
    all_scores, all_tokens, all_parents = [scores], [tokens], [torch.zeros_like(frontier)]
    features = root.features.expand(rows, k, -1)
    itself = torch.eye(k, dtype=torch.bool, device=device).expand(rows, k, k)
    ancestors = itself
    first = 1 + k
    for depth in range(1, config.depth):
        if growth is not None and not growth.deeper(all_scores):
            break
        children = step(tokens, features, ancestors, depth)
        child_scores = (scores[..., None] + children.log_probs).flatten(1)  # (R, k * k)
        child_tokens = children.tokens.flatten(1)
        all_scores.append(child_scores)
        all_tokens.append(child_tokens)
        all_parents.append(frontier.repeat_interleave(k, dim=1))
        if depth + 1 == config.depth:
            break
        scores, best = stable_topk(child_scores, k)
        tokens = child_tokens.gather(1, best)
        frontier = first + best
        parent = best // k  # row of the expanded frontier
        features = children.features.gather(1, parent[..., None].expand(-1, -1, children.features.shape[-1]))
        ancestors = ancestors.gather(1, parent[..., None].expand(-1, -1, ancestors.shape[-1]))
        ancestors = torch.cat([ancestors, itself], dim=-1)
        first += k * k
    total = config.total_tokens if growth is None else min(growth.nodes(all_scores, all_tokens), config.total_tokens)
    if total < 1:
        return DraftTree.root_only(root_tokens)
    candidates = (torch.cat(part, 1) for part in (all_scores, all_tokens, all_parents))
    return _prune(root_tokens, *candidates, total, config.depth)


def _prune(
    root_tokens: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    total: int,
    depth: int,
) -> DraftTree:
    """Keep the best `total` of the candidates (all `(R, C)`; parents count from 1, 0 is the root)."""
    _refuse_nan(scores)
    rows, candidates = scores.shape
    kept = stable_topk(scores, total)[1].sort(dim=1).values
    column = torch.zeros(rows, candidates + 1, dtype=torch.long, device=scores.device)
    numbers = torch.arange(1, total + 1, device=scores.device).expand(rows, -1)
    column.scatter_(1, kept + 1, numbers)
    parents = column.gather(1, parents.gather(1, kept))
    parents = torch.cat([torch.zeros_like(parents[:, :1]), parents], dim=1)
    depths = torch.zeros_like(parents)
    # Parents stand before children, so following every parent pointer `depth` times reaches the root.
    ancestor = torch.arange(total + 1, device=scores.device).expand(rows, -1)
    for _ in range(depth):
        depths += ancestor != 0
        ancestor = parents.gather(1, ancestor)
    return DraftTree(
        tokens=torch.cat([root_tokens[:, None], tokens.gather(1, kept)], dim=1),
        parents=parents,
        depths=depths,
        scores=torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, kept)], dim=1),
    )
