# SPDX-License-Identifier: Apache-2.0
"""A batch of draft trees as tensors. Level 0: knows neither models nor vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftTree:
    """
    `R` draft trees of `N` drafted nodes each. Column 0 is the root, parents stand before their children.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, N + 1)`):
            Target-vocabulary ids. Column 0 holds the root token.
        parents (`torch.LongTensor` of shape `(R, N + 1)`):
            Column of each node's parent. The root is its own parent.
        depths (`torch.LongTensor` of shape `(R, N + 1)`):
            Tokens after the root; 0 for the root.
        scores (`torch.FloatTensor` of shape `(R, N + 1)`):
            Sum of draft log-probabilities (nats, no temperature) along the node's path; 0 for the root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def root_only(cls, root_tokens: torch.Tensor) -> DraftTree:
        """Trees without drafted nodes, from `root_tokens` of shape `(R,)`: a plain decoding step."""
        zeros = torch.zeros_like(root_tokens)[:, None]
        return cls(root_tokens[:, None], zeros, zeros, zeros.float())

    def to(self, device: torch.device | str) -> DraftTree:
        """The same trees on another device."""
        return DraftTree(*(t.to(device) for t in (self.tokens, self.parents, self.depths, self.scores)))

    def rows(self, index: list[int]) -> DraftTree:
        """Some of the trees."""
        return DraftTree(*(t[index] for t in (self.tokens, self.parents, self.depths, self.scores)))

    def padded(self, size: int) -> DraftTree:
        """The same trees with `size` columns: the new ones are children of the root that repeat its token."""
        rows, missing = self.tokens.shape[0], size - self.tokens.shape[1]
        if missing <= 0:
            return self
        zeros = self.parents.new_zeros(rows, missing)
        return DraftTree(
            torch.cat([self.tokens, self.tokens[:, :1].expand(rows, missing)], dim=1),
            torch.cat([self.parents, zeros], dim=1),
            torch.cat([self.depths, zeros + 1], dim=1),
            torch.cat([self.scores, torch.full_like(zeros, -torch.inf, dtype=self.scores.dtype)], dim=1),
        )

    @property
    def max_depth(self) -> int:
        """Deepest level that any of the trees reaches, in tokens."""
        return int(self.depths.max()) if self.depths.numel() else 0

    def ancestor_mask(self) -> torch.Tensor:
        """`(R, N + 1, N + 1)` bool: entry `(i, j)` is true when `j` is `i` itself or one of its ancestors."""
        rows, size = self.parents.shape
        mask = torch.eye(size, dtype=torch.bool, device=self.parents.device).repeat(rows, 1, 1)
        ancestor = self.parents
        for _ in range(self.max_depth):
            mask.scatter_(2, ancestor[..., None], True)
            ancestor = self.parents.gather(1, ancestor)
        return mask

    def accepted(self, choices: torch.Tensor) -> torch.Tensor:
        """
        Nodes that the target accepts when it answers `choices[r, i]` (its next token) at node `i` of tree `r`.

        Args:
            choices (`torch.LongTensor` of shape `(R, N + 1)`): The target's next token after each node.

        Returns:
            `torch.BoolTensor` of shape `(R, N + 1)`: True on one path from the root (always true) down.
        """
        match = self.tokens == choices.gather(1, self.parents)
        match[:, 0] = True
        reached = match
        for _ in range(self.max_depth):
            reached = match & reached.gather(1, self.parents)
        return reached

    def leaves(self) -> torch.Tensor:
        """`(R, N + 1)` bool: nodes without children. The root of a tree with nodes is never one."""
        has_child = torch.zeros_like(self.parents, dtype=torch.bool)
        has_child.scatter_(1, self.parents[:, 1:], True)
        return ~has_child
