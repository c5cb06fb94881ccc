# SPDX-License-Identifier: Apache-2.0
"""The branch of each tree that the target accepts, and its likelihood under a draft. Level 4."""

from __future__ import annotations

import torch

from gto_hf.drafts import NodeSteps
from gto_hf.tree import DraftTree


def accepted_paths(tree: DraftTree, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The longest branch prefix of each tree that the target accepts.

    Args:
        tree ([`DraftTree`]): `R` trees.
        choices (`torch.LongTensor` of shape `(R, N + 1)`): The target's next token after each node; -1 for none.

    Returns:
        `paths` `(R, D)` int64, target ids with column `j` the token at depth `j + 1`, padded by the root token; and
        `lengths` `(R,)` int64. `D` is the depth of the deepest tree.
    """
    accepted = tree.accepted(choices)
    accepted[:, 0] = False
    depth = tree.max_depth
    column = torch.where(accepted, tree.depths - 1, depth)  # what is not accepted lands in a spare column
    paths = tree.tokens[:, :1].repeat(1, depth + 1)
    paths.scatter_(1, column, tree.tokens)
    return paths[:, :depth], accepted.sum(1)


def path_log_probs(
    steps: NodeSteps, root_features: torch.Tensor, paths: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """
    `log M(path | prefix)` in nats, `(R,)`, with gradient through the whole unrolled path and the prefix.

    Args:
        steps ([`NodeSteps`]): A fresh one, on the prefix whose gradient is wanted.
        root_features (`torch.FloatTensor` of shape `(R, H)`): The draft's outputs at the roots.
        paths (`torch.LongTensor` of shape `(R, D)`): Tokens the draft can say; what stands behind `lengths` is free. The
            draft is called for every column, so that ranks with equally wide paths call it equally often.
        lengths (`torch.LongTensor` of shape `(R,)`): Tokens of each path that count; 0 gives 0.
    """
    draft = steps.prefix.draft
    longest = paths.shape[1]
    if longest == 0:
        return root_features.sum(-1).float() * 0
    features = torch.stack(steps.unroll(root_features, paths[:, : longest - 1]), dim=1)
    row, column = (torch.arange(longest, device=lengths.device) < lengths[:, None]).nonzero(as_tuple=True)
    logits = draft.head(features[row, column])  # most paths are short, so few of all places count
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ids = draft.to_draft_ids(paths[row, column]).clamp(min=0)
    said = log_probs.gather(-1, ids[:, None])[:, 0]
    return said.new_zeros(len(paths)).index_add(0, row, said)
