# SPDX-License-Identifier: Apache-2.0
"""
How a draft reads known text and then steps through tree nodes below it. Level 2.

Decoding holds one prefix per sequence and asks for the tree at its end; training holds a whole sequence and asks for
trees at many positions at once. Both go through the same two classes, so both see the same numbers.
"""

from __future__ import annotations

import torch

from gto_hf.tree import Expansion, stable_topk

from .attention import KeyValues, append
from .base import DraftModel


class DraftPrefix:
    """
    A draft's keys and values over `P` known token sequences (true target features only).

    Args:
        draft ([`DraftModel`]): An attached draft.
    """

    def __init__(self, draft: DraftModel) -> None:
        self.draft = draft
        self.key_values: list[KeyValues] | None = None
        self.valid: torch.Tensor | None = None  # (P, T) bool, false for padding

    def extend(
        self,
        target_features: torch.Tensor | None,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        valid: torch.Tensor | None = None,
        *,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Append pairs: the target's feature at a position with the token after it.

        Args:
            target_features (`torch.FloatTensor` of shape `(P, F, len(feature_layers) * Ht)`): Features at positions
                `j`; None for drafts that read none.
            input_ids (`torch.LongTensor` of shape `(P, F)`): Tokens at `j + 1`.
            position_ids (`torch.LongTensor` of shape `(P, F)`): The positions `j`.
            valid (`torch.BoolTensor` of shape `(P, F)`, *optional*): False for padding.
            embeddings (`torch.FloatTensor` of shape `(P, F, H)`, *optional*): In place of the tokens'.

        Returns:
            `torch.FloatTensor` of shape `(P, F, H)`: The draft's outputs; the last one proposes the next token.
        """
        rows, width = input_ids.shape
        device = self.draft.device
        input_ids, position_ids = input_ids.to(device), position_ids.to(device)
        valid = torch.ones(rows, width, dtype=torch.bool, device=device) if valid is None else valid.to(device)
        past = 0 if self.valid is None else self.valid.shape[1]
        self.valid = valid if self.valid is None else torch.cat([self.valid, valid], dim=1)
        causal = torch.ones(width, past + width, dtype=torch.bool, device=device).tril(past)
        mask = causal & self.valid[:, None]
        features = None if target_features is None else self.draft.fuse(target_features)
        known = {} if embeddings is None else {"embeddings": embeddings.to(device, self.draft.dtype)}
        output = self.draft(input_ids, features, position_ids, self.key_values, mask, **known)
        if self.key_values is None:
            self.key_values = output.key_values
        else:
            self.key_values = [append(old, new) for old, new in zip(self.key_values, output.key_values, strict=True)]
        return output.features

    def drop_holes(self) -> None:
        """Close the gaps that rows of different growth leave, once they make up a third of the columns."""
        counts = self.valid.sum(1)
        longest = int(counts.max())
        if 3 * longest > 2 * self.valid.shape[1]:
            return
        # Keys carry their positions, so a column may move; padding goes to the end.
        order = (~self.valid).long().argsort(dim=1, stable=True)[:, :longest]
        self.valid = self.valid.gather(1, order)
        index = order[:, None, :, None]
        self.key_values = [
            tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[-1])) for x in layer)
            for layer in self.key_values
        ]


class NodeSteps:
    """
    Draft forwards over nodes of `R` trees, one level after the other, on a fixed prefix.

    Args:
        prefix ([`DraftPrefix`]): `P` sequences; tree `r` hangs on sequence `r // (R / P)`.
        root_pairs (`torch.LongTensor` of shape `(R,)`): Rotary position of each root's pair.
        visible (`torch.BoolTensor` of shape `(R, T)`): Pairs that each root sees, its own included.
    """

    def __init__(self, prefix: DraftPrefix, root_pairs: torch.Tensor, visible: torch.Tensor) -> None:
        self.prefix, self.root_pairs, self.visible = prefix, root_pairs, visible
        self.key_values: list[KeyValues] | None = None

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, ancestors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """
        Outputs `(R, F, H)` of nodes at `depth` (>= 1), from `tokens` `(R, F)` and parents' `features` `(R, F, H)`.

        `ancestors` `(R, F, S)` covers every node stepped through so far, these last.
        """
        positions = (self.root_pairs + depth)[:, None].expand_as(tokens)
        output = self.prefix.draft(
            tokens, features, positions, self.prefix.key_values, self.visible, self.key_values, ancestors
        )
        if self.key_values is None:
            self.key_values = output.key_values
        else:
            self.key_values = [append(old, new) for old, new in zip(self.key_values, output.key_values, strict=True)]
        return output.features

    def expand(self, features: torch.Tensor, k: int) -> Expansion:
        """The best `k` next tokens after nodes with outputs `features` `(R, F, H)`, as the tree policy wants them."""
        draft = self.prefix.draft
        logits = draft.head(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, ids = stable_topk(logits, k)
        log_probs = (best - logits.logsumexp(-1, keepdim=True)).clamp_(max=0)
        return Expansion(log_probs=log_probs, tokens=draft.to_target_ids(ids), features=features)

    def step(self, tokens: torch.Tensor, features: torch.Tensor, ancestors: torch.Tensor, depth: int) -> Expansion:
        """[`forward`] followed by [`expand`]: the callback of [`grow_trees`]."""
        return self.expand(self.forward(tokens, features, ancestors, depth), tokens.shape[1])

    def unroll(self, root_features: torch.Tensor, paths: torch.Tensor, *, detach: bool = False) -> list[torch.Tensor]:
        """
        Follow one given path per tree on the draft's own outputs (training-time test).

        Args:
            root_features (`torch.FloatTensor` of shape `(R, H)`): The draft's outputs at the roots.
            paths (`torch.LongTensor` of shape `(R, L)`): Target-vocabulary tokens below the roots.
            detach (`bool`, *optional*, defaults to `False`): Feed outputs back without their gradient.

        Returns:
            `list` of `L + 1` tensors `(R, H)`: outputs after the root and after each token of the path.
        """
        outputs = [root_features]
        for depth in range(1, paths.shape[1] + 1):
            ancestors = torch.ones(len(paths), 1, depth, dtype=torch.bool, device=paths.device)
            parents = outputs[-1].detach() if detach else outputs[-1]
            features = self.forward(paths[:, depth - 1 : depth], parents[:, None], ancestors, depth)
            outputs.append(features[:, 0])
        return outputs
