# SPDX-License-Identifier: Apache-2.0
"""
What a draft tree is worth under the target. Level 4, pure functions of tensors; no gradient flows through them.

Slow twin: `tests/reference/naive_gto.py`.
"""

from __future__ import annotations

import math

import torch

from gto_hf.tree import DraftTree


AGGREGATIONS = ("lse", "max", "mean", "nodes")


def along_paths(tree: DraftTree, values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` `(R, N + 1)` over a node and its ancestors; the root's own value must be 0."""
    total, ancestor = values, tree.parents
    for _ in range(tree.max_depth - 1):
        total = total + values.gather(1, ancestor)
        ancestor = tree.parents.gather(1, ancestor)
    return total


def prefix_probs(tree: DraftTree, node_log_probs: torch.Tensor) -> torch.Tensor:
    """
    `P(node)`: the target's probability of the whole path to a node (Sec. 3.1), `(R, N + 1)`, 1 at the root.

    Args:
        node_log_probs (`torch.FloatTensor` of shape `(R, N + 1)`): The target's log-probability (nats) of each node's
            token after its parent's path; -inf for what cannot be accepted. Column 0 is not read.
    """
    log_probs = node_log_probs.clone()
    log_probs[:, 0] = 0
    return along_paths(tree, log_probs).exp()


def expected_acceptance(tree: DraftTree, probs: torch.Tensor) -> torch.Tensor:
    """
    Expected number of accepted drafted tokens, `(R,)`: the sum of `P` over nodes, each counted once.

    Exact for the walk of decoding (`probs` from [`prefix_probs`]); the bonus token is not counted.
    """
    return probs[:, 1:].sum(1)


def tree_reward(tree: DraftTree, probs: torch.Tensor, aggregation: str = "lse", eta: float = 1.0) -> torch.Tensor:
    """
    Draft tree reward: how many drafted tokens one target forward is expected to keep, branch by branch.

    A branch of `l` tokens is worth the sum of its prefix probabilities, in `[0, l]`; `aggregation` joins the branches.

    Args:
        tree ([`DraftTree`]): Trees of `R` positions.
        probs (`torch.FloatTensor` of shape `(R, N + 1)`): See [`prefix_probs`].
        aggregation (`str`, *optional*, defaults to `"lse"`): `"lse"` (the paper's), `"max"`, `"mean"` (its ablation,
            Table 3) or `"nodes"` (ours: every node counted once, the true expectation).
        eta (`float`, *optional*, defaults to `1.0`): Sharpness of `"lse"`, 1 / tokens; others do not read it. The sum
            inside the logarithm grows with the number of branches, so a small `eta` does not give the mean.

    Returns:
        `torch.FloatTensor` of shape `(R,)`, in tokens, bonus not counted. `"lse"` may exceed the best branch by up to
        `log(branches) / eta`.

    Raises:
        ValueError: If `aggregation` is unknown or `eta` not positive.

    Source: https://huggingface.co/papers/2509.22134, Sec. 3.1.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"`aggregation={aggregation!r}` is unknown; choose one of {', '.join(AGGREGATIONS)}.")
    if not eta > 0 or math.isinf(eta):
        raise ValueError(f"`eta={eta}` must be a positive number.")
    if aggregation == "nodes":
        return expected_acceptance(tree, probs)
    worth = probs.clone()
    worth[:, 0] = 0
    lengths = along_paths(tree, worth)
    leaves = tree.leaves()
    if aggregation == "lse":
        return (eta * lengths).masked_fill(~leaves, -torch.inf).logsumexp(1) / eta
    if aggregation == "max":
        return lengths.masked_fill(~leaves, -torch.inf).amax(1)
    return lengths.masked_fill(~leaves, 0).sum(1) / leaves.sum(1)
