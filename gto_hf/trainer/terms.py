# SPDX-License-Identifier: Apache-2.0
"""
The tree terms of the loss: the paper's surrogate, and objectives on whole trees. Level 6.

A term plans without gradient, computes inside the one forward that carries gradient, and makes a loss of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from gto_hf.drafts import DraftModel
from gto_hf.gto import (
    GroupPlan,
    ReferenceMemory,
    SequencePrefix,
    TargetReading,
    TreePlan,
    gto_loss,
    plan_groups,
    plan_trees,
    tree_loss,
)
from gto_hf.lora import Reference
from gto_hf.tree import TreeConfig

from .frozen import reference_memory
from .gto_config import GTOConfig
from .logs import log_groups, log_trees
from .place import is_split, largest_over_ranks
from .sums import Sums


Plan = GroupPlan | TreePlan


class TreeTerm(Protocol):
    """What the trainer asks of a term."""

    # Entered around the parts of the work, by name; a benchmark puts a clock here.
    phase: Callable[[str], AbstractContextManager]

    def plan(
        self,
        unwrapped: nn.Module,
        draft: DraftModel,
        reading: TargetReading,
        groups: torch.Tensor,
        valid: torch.Tensor,
        seeds: torch.Tensor,
    ) -> Plan:
        """Trees at the groups' positions and what the target says about them; no gradient. `seeds` `(B,)` are the rows'."""

    def forward(self, prefix: SequencePrefix, plan: Any) -> torch.Tensor:
        """One number per position, `(groups, m)`, with gradient."""

    def loss(self, values: torch.Tensor, plan: Any, sums: Sums) -> torch.Tensor:
        """Sum over groups of the mean over their positions; logs what there is to log."""

    def finite(self, values: torch.Tensor, plan: Any) -> torch.Tensor:
        """`(groups,)` bool: groups whose part of the loss is finite."""


class GroupTerm:
    """The paper's: clipped surrogate on the accepted path, with advantages against a reference draft."""

    def __init__(
        self,
        args: GTOConfig,
        tree: TreeConfig,
        target: nn.Module,
        eos_ids: torch.Tensor,
        reference: Reference,
        memory: ReferenceMemory | None,
        largest: Callable[[int], int],
    ) -> None:
        self.args, self.tree, self.target, self.eos_ids = args, tree, target, eos_ids
        self.reference, self.memory, self.largest = reference, memory, largest
        self.phase = lambda name: nullcontext()

    def plan(
        self,
        unwrapped: nn.Module,
        draft: DraftModel,
        reading: TargetReading,
        groups: torch.Tensor,
        valid: torch.Tensor,
        seeds: torch.Tensor,
    ) -> GroupPlan:
        """See [`TreeTerm.plan`]."""
        args = self.args
        return plan_groups(
            draft,
            self.reference.draft(draft),
            reading.sequences,
            groups,
            valid,
            self.tree,
            self.target,
            reading.cache,
            reading.readout,
            self.eos_ids,
            memory=self.memory,
            as_reference=lambda: self.reference.context(unwrapped),
            aggregation=args.gto_aggregation,
            eta=args.gto_eta,
            delta=args.gto_delta,
            debias=args.gto_debias,
            temperature=args.target_temperature,
            sample=seeds if args.gto_path == "sample" else None,
            max_nodes=args.score_nodes,
            largest=self.largest,
            phase=self.phase,
        )

    def forward(self, prefix: SequencePrefix, plan: GroupPlan) -> torch.Tensor:
        """`log M(path)`."""
        return plan.path_log_probs(prefix)

    def loss(self, values: torch.Tensor, plan: GroupPlan, sums: Sums) -> torch.Tensor:
        """See [`gto_loss`]."""
        lengths = plan.of_groups(plan.lengths)
        grouped = gto_loss(values, plan.reference_log_probs, lengths, plan.advantages, self.args.gto_epsilon)
        log_groups(sums, plan, grouped)
        return grouped.loss

    def finite(self, values: torch.Tensor, plan: GroupPlan) -> torch.Tensor:
        """See [`TreeTerm.finite`]."""
        parts = (values, plan.reference_log_probs, plan.advantages)
        return torch.stack([part.detach().float() for part in parts]).isfinite().all(0).all(-1)


class WholeTreeTerm:
    """Objectives at every inner node of the draft's trees; no reference draft."""

    def __init__(self, args: GTOConfig, tree: TreeConfig, target: nn.Module, eos_ids: torch.Tensor) -> None:
        self.args, self.tree, self.target, self.eos_ids = args, tree, target, eos_ids
        self.phase = lambda name: nullcontext()

    def plan(
        self,
        unwrapped: nn.Module,
        draft: DraftModel,
        reading: TargetReading,
        groups: torch.Tensor,
        valid: torch.Tensor,
        seeds: torch.Tensor,
    ) -> TreePlan:
        """See [`TreeTerm.plan`]."""
        return plan_trees(
            draft,
            reading.sequences,
            groups,
            valid,
            self.tree,
            self.target,
            reading.cache,
            reading.readout,
            self.eos_ids,
            max_nodes=self.args.score_nodes,
            phase=self.phase,
        )

    def forward(self, prefix: SequencePrefix, plan: TreePlan) -> torch.Tensor:
        """Loss of each tree."""
        return plan.of_groups(tree_loss(prefix, plan, self.args.gto_objective, self.args.gto_beta))

    def loss(self, values: torch.Tensor, plan: TreePlan, sums: Sums) -> torch.Tensor:
        """See [`tree_loss`]."""
        log_trees(sums, plan, values)
        return values.mean(1).sum()

    def finite(self, values: torch.Tensor, plan: TreePlan) -> torch.Tensor:
        """See [`TreeTerm.finite`]."""
        return values.detach().isfinite().all(-1)


def tree_term(trainer: Any) -> TreeTerm | None:
    """
    The term that a trainer's configuration asks for; None for the token loss alone.

    Raises:
        ValueError: For objectives on whole trees under ZeRO-3.
    """
    args, tree, target, eos_ids = trainer.args, trainer.tree, trainer.target_model, trainer._eos_ids
    if trainer.reference is not None:
        memory = None if is_split(trainer) else reference_memory(args, trainer.reference_hash, target, tree, eos_ids)
        largest = partial(largest_over_ranks, trainer)
        return GroupTerm(args, tree, target, eos_ids, trainer.reference, memory, largest)
    if args.gto_weight > 0 and is_split(trainer):
        raise ValueError(
            f"`gto_objective={args.gto_objective!r}` does not run under ZeRO-3: ranks would call the draft unequally often. Use "
            "`gto`, or ZeRO-2."
        )
    return WholeTreeTerm(args, tree, target, eos_ids) if args.gto_weight > 0 else None
