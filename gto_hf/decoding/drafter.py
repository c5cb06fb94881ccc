# SPDX-License-Identifier: Apache-2.0
"""
The draft's side of decoding: reads accepted tokens with the target's true features, grows the next trees. Level 4.

The draft's keys and values are rebuilt every round from the target's features; nothing drafted survives in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gto_hf.drafts import DraftModel, DraftPrefix, NodeSteps
from gto_hf.tree import DraftTree, Expansion, Growth, TreeConfig, grow_trees


@contextmanager
def evaluating(draft: DraftModel) -> Iterator[None]:
    """Within it the draft is in evaluation mode: its dropout must not draw from the generator that chooses tokens."""
    training = [module for module in draft.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Drafter:
    """
    One draft during one `generate` call.

    Attributes:
        forwards (`int`): Draft forwards so far.

    Args:
        draft ([`DraftModel`]): Attached to its target.
    """

    def __init__(self, draft: DraftModel) -> None:
        self.draft, self.prefix, self.forwards = draft, DraftPrefix(draft), 0
        self._last: torch.Tensor | None = None  # output of each row's newest pair, (B, 1, H)
        self._position: torch.Tensor | None = None  # its rotary position, (B,)
        self._recent: tuple[torch.Tensor, ...] | None = None  # end of the prompt: outputs, tokens, which are real
        self._pending: list[tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def read(
        self,
        features: torch.Tensor | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        valid: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """
        Take in pairs of target features `(B, F, k * Ht)` and the tokens `(B, F)` after them, at positions `(B, F)`.

        They are forwarded when the next tree is grown, all at once. `valid` `(B, F)` is false where a row has none.
        `embeddings` `(B, F, H)` stand for tokens that have no ids; those are forwarded at once.
        """
        self._pending.append((features, tokens, positions, valid))
        if embeddings is not None:
            self._forward(embeddings)

    def _forward(self, embeddings: torch.Tensor | None = None) -> None:
        """One draft forward over everything that is pending."""
        if not self._pending:
            return
        features, tokens, positions, valid = (list(part) for part in zip(*self._pending, strict=True))
        self._pending = []
        if len(tokens) > 1 and any(v is not None for v in valid):
            valid = [
                torch.ones_like(t, dtype=torch.bool) if v is None else v for v, t in zip(valid, tokens, strict=True)
            ]
        tokens, positions = torch.cat(tokens, 1), torch.cat(positions, 1)
        fits = None if valid[0] is None else torch.cat(valid, 1).to(self.draft.device)
        outputs = self.prefix.extend(
            None if features[0] is None else torch.cat(features, 1), tokens, positions, fits, embeddings=embeddings
        )
        self.forwards += 1
        if self._recent is None:
            known = torch.full_like(tokens, embeddings is None, dtype=torch.bool) if fits is None else fits
            self._recent = tuple(x[:, -33:].to(self.draft.device) for x in (outputs, tokens, known))
        positions = positions.to(self.draft.device)
        if fits is None or len(tokens) == 1 and bool(fits[0, -1]):
            self._last, self._position = outputs[:, -1:], positions[:, -1]
            return
        # The newest pair of a row is its last valid one; rows without a new one keep theirs.
        column = torch.arange(fits.shape[1], device=fits.device).masked_fill(~fits, -1).amax(1)
        index = column.clamp(min=0)[:, None]
        last = outputs.gather(1, index[..., None].expand(-1, -1, outputs.shape[-1]))
        position = positions.gather(1, index)[:, 0]
        if self._last is not None:
            new = column >= 0
            last = torch.where(new[:, None, None], last, self._last)
            position = torch.where(new, position, self._position)
        self._last, self._position = last, position
        self.prefix.drop_holes()

    def trust(self, top_k: int) -> float:
        """
        How often the draft is right on the end of the prompt, as a share of how often it says so; at most 1.

        Compares its best `top_k` tokens at up to 32 positions with the tokens that stand there. Costs one head.
        """
        self._forward()
        outputs, tokens, valid = self._recent
        if outputs.shape[1] < 8 or not bool(valid.any()):
            return 1.0  # too short to say anything, or a prompt without ids
        logits = self.draft.head(outputs[:, :-1])
        best, ids = logits.float().topk(top_k)
        mass = (best - logits.float().logsumexp(-1, keepdim=True)).exp().sum(-1)
        right = (self.draft.to_target_ids(ids) == tokens[:, 1:, None]).any(-1)
        counted = valid[:, 1:] & valid[:, :-1]
        expected, hits = float(mass[counted].sum()), float(right[counted].sum())
        return min((hits + 1) / (expected + 1), 1.0)

    def grow(self, root_tokens: torch.Tensor, config: TreeConfig, growth: Growth | None = None) -> DraftTree:
        """The trees below the newest token `(B,)` of every row."""
        self._forward()
        steps = NodeSteps(self.prefix, self._position, self.prefix.valid)
        root = steps.expand(self._last, config.top_k)

        def step(tokens: torch.Tensor, features: torch.Tensor, ancestors: torch.Tensor, depth: int) -> Expansion:
            self.forwards += 1
            return steps.step(tokens, features, ancestors, depth)

        tree = grow_trees(step, root_tokens.to(self.draft.device), root, config, growth)
        return tree.to(root_tokens.device)

    def greedy_paths(self, root_tokens: torch.Tensor, depth: int) -> DraftTree:
        """The draft's own most likely path below every root, `depth` tokens long, whatever the tree would keep of it."""
        steps = NodeSteps(self.prefix, self._position, self.prefix.valid)
        chain = TreeConfig(depth=depth, top_k=1, total_tokens=depth)
        return grow_trees(steps.step, root_tokens.to(self.draft.device), steps.expand(self._last, 1), chain)
