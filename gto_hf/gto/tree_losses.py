# SPDX-License-Identifier: Apache-2.0
"""
Objectives on whole trees, beside the paper's: what the draft says at every node that the target was read at. Level 4.

GTO's surrogate moves the likelihood of one path per tree. These take the distribution at all inner nodes, weighted by the
probability that verification gets there. They need no reference draft.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gto_hf.drafts import DraftModel
from gto_hf.tree import DraftTree, TreeConfig

from .objectives import kl
from .reading import Readout
from .rewards import along_paths, expected_acceptance, prefix_probs
from .scoring import NodeTeacher, score_trees
from .sequences import SequencePrefix, Sequences
from .token_loss import LOSS_ELEMENTS


@dataclass(frozen=True)
class TreePlan:
    """
    Trees of a batch and what the target says about them; no gradient.

    Attributes:
        roots (`torch.LongTensor` of shape `(B, n)`): Root slots, padding groups at slot 1.
        valid (`torch.BoolTensor` of shape `(groups,)`): Groups that exist.
        trees ([`DraftTree`]): `B * n` trees of the trained draft.
        probs (`torch.FloatTensor` of shape `(B * n, N + 1)`): The target's probability of the path to each node.
        teacher ([`NodeTeacher`]): The target's distribution at the nodes that were read.
        top_k (`int`): Children per node.
        expected (`torch.FloatTensor` of shape `(groups, m)`): Expected accepted tokens of each tree.
        target_nodes, tree_nodes (`int`): Tree tokens forwarded through the target; what it would have been one by one.
    """

    roots: torch.Tensor
    valid: torch.Tensor
    trees: DraftTree
    probs: torch.Tensor
    teacher: NodeTeacher
    top_k: int
    expected: torch.Tensor
    target_nodes: int
    tree_nodes: int

    def of_groups(self, values: torch.Tensor) -> torch.Tensor:
        """`(B * n,)` values of all roots to `(groups, m)` of the groups that exist."""
        return values.view(len(self.valid), -1)[self.valid]


@torch.no_grad()
def plan_trees(
    draft: DraftModel,
    sequences: Sequences,
    groups: torch.Tensor,
    valid: torch.Tensor,
    tree: TreeConfig,
    target: Any,
    cache: Any,
    readout: Readout,
    eos_ids: torch.Tensor,
    *,
    max_nodes: int = 1024,
    phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
) -> TreePlan:
    """
    Trees of `draft` at every position of every group, and the target's distribution at their inner nodes.

    Args:
        groups (`torch.LongTensor` of shape `(B, G, m)`), valid (`(B, G)`): See [`sample_groups`].
        phase (`Callable`): Entered around `"trees"` and `"scoring"`.
        Others: See [`plan_groups`].
    """
    roots, keep = groups.flatten(1), valid.flatten()
    with phase("trees"):
        trees = SequencePrefix(draft, sequences).grow(roots, tree)
    with phase("scoring"):
        (scores,), nodes, (teacher,) = score_trees(
            target,
            cache,
            [trees],
            roots,
            sequences,
            readout,
            eos_ids,
            keep=keep.repeat_interleave(groups.shape[-1]),
            max_nodes=max_nodes,
            teach=draft.kept_ids,
        )
    probs = prefix_probs(trees, scores.node_log_probs)
    # Nothing is drafted behind the end of a text.
    ended = torch.isin(trees.tokens, eos_ids)
    ended[:, 0] = False
    missing = ~keep.repeat_interleave(groups.shape[-1])[:, None]
    index = teacher.index.masked_fill(ended | trees.leaves() | missing | (probs == 0), -1)
    return TreePlan(
        roots=roots,
        valid=keep,
        trees=trees,
        probs=probs,
        teacher=NodeTeacher(index, teacher.logits, teacher.normaliser),
        top_k=tree.top_k,
        expected=expected_acceptance(trees, probs).view(len(keep), -1)[keep],
        target_nodes=nodes,
        tree_nodes=int(keep.sum()) * groups.shape[-1] * tree.total_tokens,
    )


def node_features(
    prefix: SequencePrefix, roots: torch.Tensor, trees: DraftTree, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The draft's outputs at nodes of given trees, with gradient through their whole paths and the prefix.

    Args:
        wanted (`torch.BoolTensor` of shape `(R, N + 1)`): Nodes; with a node every ancestor must be wanted.

    Returns:
        Outputs `(R, S, H)`, the root's first, and the place `(R, N + 1)` of each node among them (0 where not wanted).
    """
    steps, features = prefix.at(roots)
    outputs = [features[:, None]]
    place = torch.zeros_like(trees.parents)
    columns: list[torch.Tensor] = []
    ancestors = trees.ancestor_mask()
    row = torch.arange(len(features), device=features.device)[:, None]
    wanted = wanted.clone()
    wanted[:, 0] = False
    for depth in range(1, int((trees.depths * wanted).max()) + 1):
        here = wanted & (trees.depths == depth)
        width = int(here.sum(1).max())
        column = here.int().argsort(dim=1, descending=True, stable=True)[:, :width]
        real = here.gather(1, column)
        column = torch.where(real, column, 0)  # padding repeats the root: nobody reads it
        made = sum(o.shape[1] for o in outputs)
        where = torch.where(real, torch.arange(made, made + width, device=row.device), 0)
        place.scatter_add_(1, column, where)  # column 0 gets zeros
        so_far = torch.cat(outputs, dim=1)
        parents = place.gather(1, trees.parents.gather(1, column))
        above = so_far.gather(1, parents[..., None].expand(-1, -1, so_far.shape[-1]))
        columns.append(column)
        every = torch.cat(columns, dim=1)
        sees = ancestors[row[..., None], column[..., None], every[:, None]] & (every > 0)[:, None]
        own = torch.arange(every.shape[1] - width, every.shape[1], device=row.device)
        sees[:, torch.arange(width), own] = True
        outputs.append(steps.forward(trees.tokens.gather(1, column), above, sees, depth))
    return torch.cat(outputs, dim=1), place


def tree_loss(prefix: SequencePrefix, plan: TreePlan, objective: str = "tree_kl", beta: float = 1.0) -> torch.Tensor:
    """
    Loss of each tree, `(B * n,)`, with gradient.

    `"tree_kl"`: `sum_v P(v) KL(T(.|v) || M(.|v))` up to a constant, over inner nodes v and the root: soft cross-entropy
    where verification goes, on the draft's own recurrent features.

    `"membership"`: `-sum_v P(v) sum_c T(c|v) sigmoid((log M(path to c) - s) / beta)` with s the score that a child of v
    needs to be in the tree: as beta goes to 0 this is minus the expected acceptance length of the tree (but for the nodes on
    the edge, which count half), and for beta > 0 its gradient lifts the nodes near the edge that the target wants.

    Args:
        prefix ([`SequencePrefix`]): A pass of the trained draft over the sequences.
        plan ([`TreePlan`]): Trees.
        objective (`str`, *optional*, defaults to `"tree_kl"`): Which of the two.
        beta (`float`, *optional*, defaults to `1.0`): Softness of the membership, in nats.
    """
    draft, trees = prefix.prefix.draft, plan.trees
    wanted = plan.teacher.index >= 0
    outputs, place = node_features(prefix, plan.roots, trees, wanted)
    row, column = wanted.nonzero(as_tuple=True)
    if len(row) == 0:
        return outputs.float().sum((1, 2)) * 0
    features = outputs[row, place[row, column]]
    number = plan.teacher.index[row, column]
    if objective == "tree_kl":

        def part(features: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
            logits, teacher, normaliser = _logits(draft, features, plan.teacher, number[some])
            with torch.autocast(logits.device.type, enabled=False):  # sums over a vocabulary need float32
                return kl(logits, teacher, normaliser)
    else:
        paths = _path_scores(draft, trees, features, row, column)[row, column]
        lowest = trees.scores.amin(1)[row]

        def part(features: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
            logits, teacher, normaliser = _logits(draft, features, plan.teacher, number[some])
            with torch.autocast(logits.device.type, enabled=False):
                scores = paths[some, None] + logits.log_softmax(-1)
                # A child must be among its parent's first, and as likely as the last node that was kept.
                last = scores.detach().topk(plan.top_k).values[:, -1]
                cut = torch.maximum(last, lowest[some].to(logits.dtype))
                chance = ((scores - cut[:, None]) / beta).sigmoid()
                return -torch.linalg.vecdot((teacher - normaliser[:, None]).exp(), chance)

    value = _in_parts(part, features, len(draft.kept_ids))
    weighted = value * plan.probs[row, column].to(value.dtype)
    return value.new_zeros(len(trees.tokens)).index_add(0, row, weighted)


def _logits(
    draft: DraftModel, features: torch.Tensor, teacher: NodeTeacher, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft logits of nodes `(n, Vd)`, and the teacher's with their normaliser, at least in float32."""
    logits = draft.head(features)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, teacher.logits[number].to(logits.dtype), teacher.normaliser[number].to(logits.dtype)


def _in_parts(
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], features: torch.Tensor, vocab: int
) -> torch.Tensor:
    """`part(features, numbers)` `(n,)` for all nodes, with the logits of a few at a time (see `LOSS_ELEMENTS`)."""
    numbers = torch.arange(len(features), device=features.device)
    pieces = numbers.tensor_split(max(1, -(-len(features) * vocab // LOSS_ELEMENTS)))
    if len(pieces) == 1:
        return part(features, numbers)
    return torch.cat([checkpoint(part, features[some], some, use_reentrant=False) for some in pieces])


def _path_scores(
    draft: DraftModel, trees: DraftTree, features: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    """
    `log M(path to node)` `(R, N + 1)` with gradient, for nodes whose parents have `features` `(n, H)` at `row`, `column`.
    """
    at = torch.full_like(trees.parents, -1)
    at[row, column] = torch.arange(len(row), device=row.device)
    above = at.gather(1, trees.parents)
    above[:, 0] = -1
    tree, node = (above >= 0).nonzero(as_tuple=True)
    parent, ids = above[tree, node], draft.to_draft_ids(trees.tokens)[tree, node].clamp(min=0)
    order = parent.argsort(stable=True)  # so that a part of the parents has a range of the children
    tree, node, parent, ids = tree[order], node[order], parent[order], ids[order]

    def part(features: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        logits = draft.head(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        here = (parent >= some[0]) & (parent <= some[-1])
        with torch.autocast(logits.device.type, enabled=False):
            return logits[parent[here] - some[0], ids[here]] - logits.logsumexp(-1)[parent[here] - some[0]]

    said = _in_parts(part, features, len(draft.kept_ids))
    steps = said.new_zeros(trees.tokens.shape).index_put((tree, node), said)
    return along_paths(trees, steps)
