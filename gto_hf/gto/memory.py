# SPDX-License-Identifier: Apache-2.0
"""
What is known about the reference draft's trees from earlier epochs. Level 4.

M0 never changes, so its tree at a position and the target's view of it never change. They are kept per row when positions come
from a fixed grid. The target's values of M0's nodes also serve the trained draft's tree below the same root: equal nodes need no
forward, and get equal bits.
"""

from __future__ import annotations

import torch

from gto_hf.tree import DraftTree

from .scoring import TreeScores
from .sequences import Sequences
from .store import RowStore, row_key


class ReferenceMemory:
    """
    Trees of M0 and their scores, by row and root.

    Args:
        store ([`RowStore`]): Where they are kept. Its facts must name M0, target, tree and temperature.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def recall(
        self, sequences: Sequences, roots: torch.Tensor, keep: torch.Tensor
    ) -> tuple[DraftTree, TreeScores] | None:
        """
        Trees at roots `(B, n)` and their scores, if those of every sequence are known.

        Args:
            keep (`torch.BoolTensor` of shape `(B, n)`): Roots that count. Trees of the others are the root alone.
        """
        found = {}
        for b in keep.any(1).nonzero()[:, 0].tolist():
            row = self.store.get(self._key(sequences, b))
            if row is None or not torch.equal(row["roots"], self._positions(sequences, roots, keep, b)):
                return None
            found[b] = row
        if not found:
            return None
        width = next(iter(found.values()))["tokens"].shape[1]

        def joined(name: str, fill: torch.Tensor) -> torch.Tensor:
            values = fill[..., None].repeat(1, 1, width)
            for b, row in found.items():
                values[b, keep[b]] = row[name].to(values.device, values.dtype)
            return values.flatten(0, 1)

        zeros = torch.zeros_like(roots)
        tokens = joined("tokens", sequences.input_ids.gather(1, roots))
        tree = DraftTree(tokens, joined("parents", zeros), joined("depths", zeros), joined("scores", zeros.float()))
        return tree, TreeScores(joined("log_probs", zeros.float()), joined("choices", zeros - 1))

    def _key(self, sequences: Sequences, b: int) -> str:
        return row_key(sequences.input_ids[b][sequences.valid[b]])

    @staticmethod
    def _positions(sequences: Sequences, roots: torch.Tensor, keep: torch.Tensor, b: int) -> torch.Tensor:
        return sequences.position_ids[b].gather(0, roots[b][keep[b]]).int().cpu()

    def remember(
        self, sequences: Sequences, roots: torch.Tensor, keep: torch.Tensor, trees: DraftTree, scores: TreeScores
    ) -> None:
        """Keep trees of `B * n` rows at roots `(B, n)` with their scores; only those that count."""
        count = roots.shape[1]
        for b in keep.any(1).nonzero()[:, 0].tolist():
            here = keep[b].nonzero()[:, 0] + b * count
            self.store.put(
                self._key(sequences, b),
                {
                    "roots": self._positions(sequences, roots, keep, b),
                    "tokens": trees.tokens[here].int(),
                    "parents": trees.parents[here].short(),
                    "depths": trees.depths[here].short(),
                    "scores": trees.scores[here].float(),
                    "log_probs": scores.node_log_probs[here],
                    "choices": scores.choices[here].int(),
                },
            )
