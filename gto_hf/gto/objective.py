# SPDX-License-Identifier: Apache-2.0
"""Group-based training objective, as pure functions of tensors. Level 4. Slow twin: `tests/reference/naive_gto.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def group_advantages(
    rewards: torch.Tensor, reference_rewards: torch.Tensor | None, delta: float = 1e-4
) -> torch.Tensor:
    """
    Standardised, debiased rewards within each group: `A = (R - mean) / (std + delta)`.

    Args:
        rewards (`torch.FloatTensor` of shape `(groups, m)`): Rewards of the trained draft's trees.
        reference_rewards (`torch.FloatTensor` of shape `(groups, m)`, *optional*): Of the reference draft's trees at
            the same positions; subtracted to remove how easy a position is. None leaves the bias in (an ablation).
        delta (`float`, *optional*, defaults to `1e-4`): Added to the population standard deviation. The paper gives no
            value; a much smaller one would blow float noise near the reference up to +-1.

    Returns:
        `torch.FloatTensor` of shape `(groups, m)`. All zero for `m = 1`, and where draft and reference agree.

    Source: https://huggingface.co/papers/2509.22134, Sec. 3.2.
    """
    relative = rewards if reference_rewards is None else rewards - reference_rewards
    mean = relative.mean(1, keepdim=True)
    std = relative.std(1, correction=0, keepdim=True)
    return (relative - mean) / (std + delta)


@dataclass(frozen=True)
class GroupLoss:
    """
    Result of [`gto_loss`].

    Attributes:
        loss (`torch.FloatTensor` scalar): Sum over groups of the mean over their positions, to be divided by the number
            of groups in the whole (accumulated, all-rank) batch.
        ratio (`torch.FloatTensor` of shape `(groups, m)`): `s`, detached.
        clipped (`torch.BoolTensor` of shape `(groups, m)`): Where the clip was active and cut the gradient.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def gto_loss(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    lengths: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float = 0.2,
) -> GroupLoss:
    """
    Clipped surrogate on the accepted path: `-min(s A, clip(s, 1 - eps, 1 + eps) A)`.

    `s = exp((log M(path) - log M0(path)) / max(l, 1))`, the per-token likelihood ratio of the accepted path.

    Args:
        log_probs (`torch.FloatTensor` of shape `(groups, m)`): `log M(path)` in nats, with gradient; 0 for `l = 0`.
        reference_log_probs (`torch.FloatTensor` of shape `(groups, m)`): `log M0(path)`.
        lengths (`torch.LongTensor` of shape `(groups, m)`): `l`, accepted tokens.
        advantages (`torch.FloatTensor` of shape `(groups, m)`): See [`group_advantages`]; no gradient.
        epsilon (`float`, *optional*, defaults to `0.2`): Clip range; PPO's value, the paper gives none.

    Source: https://huggingface.co/papers/2509.22134, Sec. 3.2 and Alg. 1.
    """
    ratio = ((log_probs - reference_log_probs) / lengths.clamp(min=1)).exp()
    free = ratio * advantages
    bound = ratio.clamp(1 - epsilon, 1 + epsilon) * advantages
    loss = -torch.minimum(free, bound).mean(1).sum()
    return GroupLoss(loss=loss, ratio=ratio.detach(), clipped=(bound < free).detach())
