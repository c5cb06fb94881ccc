# SPDX-License-Identifier: Apache-2.0
"""A batch of training sequences as a draft sees it: one prefix pass, then steps below many roots at once. Level 4."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gto_hf.drafts import DraftModel, DraftPrefix, NodeSteps
from gto_hf.tree import DraftTree, TreeConfig, grow_trees


@dataclass(frozen=True)
class Sequences:
    """
    Token sequences with the target's features.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(B, T)`): Tokens.
        features (`torch.FloatTensor` of shape `(B, T, len(feature_layers) * Ht)`): The target's, not yet fused.
        valid (`torch.BoolTensor` of shape `(B, T)`): False for padding, on either side.
        position_ids (`torch.LongTensor` of shape `(B, T)`): Positions of the valid tokens, from 0.
    """

    input_ids: torch.Tensor
    features: torch.Tensor
    valid: torch.Tensor
    position_ids: torch.Tensor


class SequencePrefix:
    """
    A draft's pass over whole sequences; roots anywhere in them can be stepped from.

    The pair at slot `j` (feature `j`, token `j + 1`) belongs to the root at slot `j + 1`. Drafts that read no features
    read the first token as well: their columns are one ahead.
    """

    def __init__(self, draft: DraftModel, sequences: Sequences) -> None:
        self.sequences = sequences
        self.prefix = DraftPrefix(draft)
        self._first = 1 if draft.reads_features else 0  # slot of the root that column 0 belongs to
        if not draft.reads_features:
            self.outputs = self.prefix.extend(None, sequences.input_ids, sequences.position_ids - 1, sequences.valid)
            return
        self.outputs = self.prefix.extend(
            sequences.features[:, :-1],
            sequences.input_ids[:, 1:],
            sequences.position_ids[:, :-1],
            sequences.valid[:, :-1] & sequences.valid[:, 1:],
        )

    def at(self, roots: torch.Tensor) -> tuple[NodeSteps, torch.Tensor]:
        """
        Steps below roots at slots `(B, n)` (each >= 1), and the draft's outputs there `(B * n, H)`.
        """
        batch, count = roots.shape
        pairs = roots - self._first
        width = self.outputs.shape[-1]
        features = self.outputs.gather(1, pairs[..., None].expand(-1, -1, width)).flatten(0, 1)
        length = self.outputs.shape[1]
        visible = self.prefix.valid[:, None] & (torch.arange(length, device=roots.device) <= pairs[..., None])
        positions = self.sequences.position_ids.gather(1, roots - 1).flatten()
        return NodeSteps(self.prefix, positions, visible.view(batch * count, length)), features

    def grow(self, roots: torch.Tensor, config: TreeConfig) -> DraftTree:
        """The tree that decoding would draft at each root `(B, n)`: `B * n` trees, sequence-major."""
        steps, features = self.at(roots)
        tokens = self.sequences.input_ids.gather(1, roots).flatten()
        return grow_trees(steps.step, tokens, steps.expand(features[:, None], config.top_k), config)

    def unrolled(self, roots: torch.Tensor, steps: int, *, detach: bool = False) -> list[torch.Tensor]:
        """
        Draft outputs `(B, n, H)` of `steps` unrolled steps that follow the text below each root (training-time test).

        Step 0 is the root's own; with `detach` no gradient flows through one step's output into the next. Past the end of a row the last token is repeated; mask those steps.
        """
        batch, count = roots.shape
        position = roots[..., None] + torch.arange(1, steps, device=roots.device)
        ids = self.sequences.input_ids
        paths = ids.gather(1, position.clamp(max=ids.shape[1] - 1).flatten(1)).view(batch * count, steps - 1)
        nodes, features = self.at(roots)
        return [f.view(batch, count, -1) for f in nodes.unroll(features, paths, detach=detach)]

    def unrolled_logits(self, roots: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The draft's logits `(B, n, Vd)` of [`unrolled`]."""
        return [self.prefix.draft.head(f) for f in self.unrolled(roots, steps)]
