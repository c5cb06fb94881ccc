# SPDX-License-Identifier: Apache-2.0
"""
The two halves of a training step. Level 4: models and tensors in, tensors out; no trainer, no logging.

`plan_groups` decides, without gradient, what to reinforce: trees of draft and reference, the target's view of them,
rewards, advantages, accepted paths. `draft_forward` is everything that carries gradient, in one call, so that wrappers
(DDP, FSDP, autocast) see one forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gto_hf.drafts import DraftModel
from gto_hf.tree import DraftTree, TreeConfig

from .memory import ReferenceMemory
from .objective import group_advantages
from .paths import accepted_paths, path_log_probs
from .reading import Readout
from .rewards import expected_acceptance, prefix_probs, tree_reward
from .scoring import TreeScores, score_trees
from .sequences import SequencePrefix, Sequences
from .token_loss import TokenLoss


@dataclass(frozen=True)
class GroupPlan:
    """
    What one batch reinforces. Groups are those that exist; `B * G * m` roots include padding groups.

    Attributes:
        roots (`torch.LongTensor` of shape `(B, G * m)`): Root slots, padding groups at slot 1.
        valid (`torch.BoolTensor` of shape `(B * G,)`): Groups that exist.
        paths, lengths: Accepted path of the draft's tree at each root, `(B * G * m, D)` and `(B * G * m,)`.
        advantages (`torch.FloatTensor` of shape `(groups, m)`): Of the groups that exist.
        reference_log_probs (`torch.FloatTensor` of shape `(groups, m)`): `log M0(path)`.
        rewards, reference_rewards, expected, reference_expected (`(groups, m)`): For the log.
        target_nodes (`int`): Tree tokens forwarded through the target. tree_nodes (`int`): What it would have been with
            every tree on its own.
    """

    roots: torch.Tensor
    valid: torch.Tensor
    paths: torch.Tensor
    lengths: torch.Tensor
    advantages: torch.Tensor
    reference_log_probs: torch.Tensor
    rewards: torch.Tensor
    reference_rewards: torch.Tensor
    expected: torch.Tensor
    reference_expected: torch.Tensor
    target_nodes: int
    tree_nodes: int

    def of_groups(self, values: torch.Tensor) -> torch.Tensor:
        """`(B * G * m,)` values of all roots to `(groups, m)` of the groups that exist."""
        return values.view(len(self.valid), -1)[self.valid]

    def path_log_probs(self, prefix: SequencePrefix) -> torch.Tensor:
        """`log M(path)` `(groups, m)` in nats under the draft of `prefix`, with gradient."""
        nodes, features = prefix.at(self.roots)
        return self.of_groups(path_log_probs(nodes, features, self.paths, self.lengths))


@torch.no_grad()
def plan_groups(
    draft: DraftModel,
    reference: DraftModel,
    sequences: Sequences,
    groups: torch.Tensor,
    valid: torch.Tensor,
    tree: TreeConfig,
    target: Any,
    cache: Any,
    readout: Readout,
    eos_ids: torch.Tensor,
    *,
    memory: ReferenceMemory | None = None,
    as_reference: Callable[[], AbstractContextManager] = nullcontext,
    aggregation: str = "lse",
    eta: float = 1.0,
    delta: float = 1e-4,
    debias: bool = True,
    temperature: float = 1.0,
    sample: torch.Tensor | None = None,
    max_nodes: int = 1024,
    phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    largest: Callable[[int], int] = int,
) -> GroupPlan:
    """
    Trees of `draft` (M) and `reference` (M0) at every position of every group, and what the target makes of them.

    Args:
        draft, reference ([`DraftModel`]): May be the same module if `as_reference` switches an adapter off.
        sequences ([`Sequences`]): The batch.
        groups (`torch.LongTensor` of shape `(B, G, m)`), valid (`(B, G)`): See [`sample_groups`].
        tree ([`TreeConfig`]): Shape of the trees, as decoding would draft them.
        target, cache, eos_ids, temperature, sample, max_nodes, largest: See [`score_trees`].
        readout ([`Readout`]): The target's logits, with all roots among its slots.
        memory ([`ReferenceMemory`], *optional*): M0's trees from earlier epochs; what is not there is added.
        as_reference (`Callable`): Context in which `reference` is M0.
        aggregation, eta: See [`tree_reward`]. delta, debias: See [`group_advantages`].
        phase (`Callable`): Entered around the parts of the work, by name: `"trees"`, `"scoring"`, `"paths"`.
    """
    roots = groups.flatten(1)
    keep = valid.flatten()
    kept_roots = keep.repeat_interleave(groups.shape[-1])
    with phase("trees"):
        own = SequencePrefix(draft, sequences).grow(roots, tree)
        with as_reference():
            reference_prefix = SequencePrefix(reference, sequences)
        others, known = _reference_trees(
            memory, reference_prefix, as_reference, sequences, roots, kept_roots.view_as(roots), tree
        )

    # Draft and reference trees share one trie: equal nodes get equal bits, so rounding in half precision cannot pass for a
    # difference in reward.
    with phase("scoring"):
        (scores, reference_scores), nodes, _ = score_trees(
            target,
            cache,
            [own, others],
            roots,
            sequences,
            readout,
            eos_ids,
            keep=kept_roots,
            known=[None, known],
            temperature=temperature,
            sample=sample,
            max_nodes=max_nodes,
            largest=largest,
        )
    if memory is not None and known is None:
        memory.remember(sequences, roots, kept_roots.view_as(roots), others, reference_scores)

    def judge(trees: DraftTree, scores: TreeScores) -> tuple[torch.Tensor, torch.Tensor]:
        probs = prefix_probs(trees, scores.node_log_probs)
        rewards, expected = tree_reward(trees, probs, aggregation, eta), expected_acceptance(trees, probs)
        return rewards.view(len(keep), -1)[keep], expected.view(len(keep), -1)[keep]

    rewards, expected = judge(own, scores)
    reference_rewards, reference_expected = judge(others, reference_scores)
    paths, lengths = accepted_paths(own, scores.choices)
    lengths = lengths * kept_roots
    longest = largest(int(lengths.max()))  # ranks that share a draft unroll equally far
    paths = F.pad(paths, (0, max(0, longest - paths.shape[1])))[:, :longest]
    with phase("paths"), as_reference():
        steps, features = reference_prefix.at(roots)
        reference_log_probs = path_log_probs(steps, features, paths, lengths).view(len(keep), -1)[keep]
    return GroupPlan(
        roots=roots,
        valid=keep,
        paths=paths,
        lengths=lengths,
        advantages=group_advantages(rewards, reference_rewards if debias else None, delta),
        reference_log_probs=reference_log_probs,
        rewards=rewards,
        reference_rewards=reference_rewards,
        expected=expected,
        reference_expected=reference_expected,
        target_nodes=nodes,
        tree_nodes=2 * int(keep.sum()) * groups.shape[-1] * tree.total_tokens,
    )


def draft_forward(
    draft: DraftModel,
    sequences: Sequences,
    token_roots: torch.Tensor,
    steps: int,
    token_loss: Callable[[list[torch.Tensor]], TokenLoss],
    of_trees: Callable[[SequencePrefix], torch.Tensor] | None = None,
    *,
    detach: bool = False,
) -> tuple[TokenLoss, torch.Tensor | None]:
    """
    Everything of a step that carries gradient: one pass over the sequences, the unrolled steps, the trees.

    Args:
        token_roots (`torch.LongTensor` of shape `(B, n)`): Roots of the token loss.
        steps (`int`): Unrolled steps of the token loss.
        token_loss (`Callable`): Takes the draft's outputs of each step, `(B, n, H)`; applies the draft's head.
        of_trees (`Callable`, *optional*): Takes the pass over the sequences; see [`GroupPlan.path_log_probs`].
        detach (`bool`, *optional*, defaults to `False`): See [`SequencePrefix.unrolled`].

    Returns:
        The token loss, and what `of_trees` gives.
    """
    prefix = SequencePrefix(draft, sequences)
    tokens = token_loss(prefix.unrolled(token_roots, steps, detach=detach))
    return tokens, None if of_trees is None else of_trees(prefix)


def _reference_trees(
    memory: ReferenceMemory | None,
    prefix: SequencePrefix,
    as_reference: Callable[[], AbstractContextManager],
    sequences: Sequences,
    roots: torch.Tensor,
    keep: torch.Tensor,
    tree: TreeConfig,
) -> tuple[DraftTree, TreeScores | None]:
    """M0's trees at `roots`: remembered with their scores, or grown."""
    recalled = None if memory is None else memory.recall(sequences, roots, keep)
    if recalled is not None:
        return recalled
    with as_reference():
        return prefix.grow(roots, tree), None
