# SPDX-License-Identifier: Apache-2.0
"""What [`GTOTrainer`] logs every step. Level 6."""

from __future__ import annotations

import torch

from gto_hf.gto import GroupLoss, GroupPlan, TokenLoss

from .sums import Sums


def logged_names(steps: int, *, with_groups: bool) -> tuple[list[str], list[str]]:
    """Names of the logged means and totals, for `steps` unrolled steps and with or without a GTO term."""
    means = ["token_loss", *(f"accuracy/step_{k}" for k in range(steps))]
    totals = ["trained_tokens"]
    if with_groups:
        means += [f"{what}/{who}" for what in ("reward", "expected_acceptance") for who in ("draft", "reference")]
        means += ["accepted_length", "gto/advantage_abs", "gto/ratio", "gto/clip_fraction", "gto/loss"]
        totals += ["skipped_sequences", "gto/target_nodes", "gto/tree_nodes"]
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
    sums.values("expected_acceptance/draft", plan.expected)
    sums.values("expected_acceptance/reference", plan.reference_expected)
    sums.values("accepted_length", plan.of_groups(plan.lengths))
    sums.values("gto/advantage_abs", plan.advantages.abs())
    sums.values("gto/ratio", grouped.ratio)
    sums.values("gto/clip_fraction", grouped.clipped)
    sums.mean("gto/loss", grouped.loss.detach(), len(plan.advantages))
    sums.total("gto/target_nodes", plan.target_nodes)
    sums.total("gto/tree_nodes", plan.tree_nodes)
