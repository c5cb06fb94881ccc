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

    def recall(self, sequences: Sequences, roots: torch.Tensor) -> tuple[DraftTree, TreeScores] | None:
        """Trees at roots `(B, n)` and their scores, if they are known for every sequence with exactly these roots."""
        found = []
        for b, positions in enumerate(sequences.position_ids.gather(1, roots).int().cpu()):
            row = self.store.get(self._key(sequences, b))
            if row is None or not torch.equal(row["roots"], positions):
                return None
            found.append(row)

        def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([row[name] for row in found]).to(roots.device, dtype)

        tokens, parents, depths = (joined(name, torch.long) for name in ("tokens", "parents", "depths"))
        tree = DraftTree(tokens, parents, depths, joined("scores", torch.float32))
        return tree, TreeScores(joined("log_probs", torch.float32), joined("choices", torch.long))

    def _key(self, sequences: Sequences, b: int) -> str:
        return row_key(sequences.input_ids[b][sequences.valid[b]])

    def remember(self, sequences: Sequences, roots: torch.Tensor, trees: DraftTree, scores: TreeScores) -> None:
        """Keep trees of `B * n` rows at roots `(B, n)` with their scores."""
        batch, count = roots.shape
        for b in range(batch):
            here = slice(b * count, (b + 1) * count)
            self.store.put(
                self._key(sequences, b),
                {
                    "roots": sequences.position_ids[b].gather(0, roots[b]).int(),
                    "tokens": trees.tokens[here].int(),
                    "parents": trees.parents[here].short(),
                    "depths": trees.depths[here].short(),
                    "scores": trees.scores[here].float(),
                    "log_probs": scores.node_log_probs[here],
                    "choices": scores.choices[here].int(),
                },
            )
