# SPDX-License-Identifier: Apache-2.0
"""What [`GTOTrainer`] logs every step. Level 6."""

from __future__ import annotations

import torch

from gto_hf.gto import GroupLoss, GroupPlan, TokenLoss, TreePlan

from .sums import Sums


def logged_names(steps: int, objective: str | None) -> tuple[list[str], list[str]]:
    """Names of the logged means and totals, for `steps` unrolled steps and a tree objective or none."""
    means = ["token_loss", *(f"accuracy/step_{k}" for k in range(steps))]
    totals = ["trained_tokens"]
    if objective is not None:
        totals += ["skipped_sequences", "gto/target_nodes", "gto/tree_nodes"]
        means += ["expected_acceptance/draft", "gto/loss"]
    if objective == "gto":
        means += ["reward/draft", "reward/reference", "expected_acceptance/reference"]
        means += ["accepted_length", "gto/advantage_abs", "gto/ratio", "gto/clip_fraction"]
    return means, totals


def log_tokens(sums: Sums, tokens: TokenLoss, skipped: torch.Tensor | None) -> None:
    """Token loss (nats per token, steps summed), accuracy of every step, trained tokens, sequences without a group."""
    sums.mean("token_loss", tokens.loss.detach(), tokens.counted[0])
    for k, (correct, counted) in enumerate(zip(tokens.correct, tokens.counted, strict=True)):
        sums.mean(f"accuracy/step_{k}", correct, counted)
    sums.total("trained_tokens", tokens.counted[0])
    if skipped is not None:
        sums.total("skipped_sequences", skipped)


def log_groups(sums: Sums, plan: GroupPlan, grouped: GroupLoss) -> None:
    """Rewards and true expected acceptance of draft and reference, accepted length, advantage, ratio and clipping."""
    sums.values("reward/draft", plan.rewards)
    sums.values("reward/reference", plan.reference_rewards)
    sums.values("expected_acceptance/reference", plan.reference_expected)
    sums.values("accepted_length", plan.of_groups(plan.lengths))
    sums.values("gto/advantage_abs", plan.advantages.abs())
    sums.values("gto/ratio", grouped.ratio)
    sums.values("gto/clip_fraction", grouped.clipped)
    _log_any(sums, plan, grouped.loss)


def log_trees(sums: Sums, plan: TreePlan, values: torch.Tensor) -> None:
    """Expected acceptance and loss of whole trees, `values` `(groups, m)`."""
    _log_any(sums, plan, values.mean(1).sum())


def _log_any(sums: Sums, plan: GroupPlan | TreePlan, loss: torch.Tensor) -> None:
    sums.values("expected_acceptance/draft", plan.expected)
    sums.mean("gto/loss", loss.detach(), int(plan.valid.sum()))
    sums.total("gto/target_nodes", plan.target_nodes)
    sums.total("gto/tree_nodes", plan.tree_nodes)
