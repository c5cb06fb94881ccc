# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3's token loss: soft cross-entropy over several unrolled steps (training-time test). Level 4.

Source: Li et al. 2025, https://huggingface.co/papers/2503.01840; step weights `0.8**k` are the released code's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Teacher:
    """
    The target's distribution over the draft's vocabulary at every position that some root needs.

    Attributes:
        probs (`torch.FloatTensor` of shape `(B, T', Vd)`): Renormalised over the kept tokens.
        top (`torch.LongTensor` of shape `(B, T')`): Most likely kept token, as a draft id.
        sayable (`torch.BoolTensor` of shape `(B, T')`): Whether no token outside the draft's vocabulary is likelier.
        first (`int`): Sequence position of column 0.
    """

    probs: torch.Tensor
    top: torch.Tensor
    sayable: torch.Tensor
    first: int


def make_teacher(logits: torch.Tensor, kept: torch.Tensor, first: int) -> Teacher:
    """
    Teacher from target `logits` `(B, T', V)` at positions `first, first + 1, ..`, for kept ids `(Vd,)`.

    The float32 copy holds the draft's vocabulary only.
    """
    some = logits if len(kept) == logits.shape[-1] else logits.index_select(-1, kept)
    best, top = some.max(-1)
    return Teacher(some.float().softmax(-1), top, best == logits.amax(-1), first)


@dataclass(frozen=True)
class TokenLoss:
    """
    Sums of one batch; divide `loss` by the number of roots in the whole batch.

    Attributes:
        loss (`torch.FloatTensor` scalar): Sum over roots and steps of the weighted cross-entropy, in nats.
        correct (`torch.LongTensor` of shape `(steps,)`): Roots whose most likely token was the target's.
        counted (`torch.LongTensor` of shape `(steps,)`): Supervised roots of each step.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    counted: torch.Tensor


def supervised_steps(targets: torch.Tensor, roots: torch.Tensor, steps: int) -> torch.Tensor:
    """
    `(B, n, steps)` bool: step `k` of root `t` counts if every token `t + 1 .. t + 1 + k` is a supervised one.

    Args:
        targets (`torch.BoolTensor` of shape `(B, T)`): See [`supervised_targets`].
        roots (`torch.LongTensor` of shape `(B, n)`): Root positions.
    """
    length = targets.shape[1]
    position = roots[..., None] + 1 + torch.arange(steps, device=roots.device)
    inside = position < length
    flat = targets.gather(1, position.clamp(max=length - 1).flatten(1)).view_as(position)
    return (flat & inside).cumprod(-1).bool()


def token_loss(
    logits: list[torch.Tensor],
    teacher: Teacher,
    roots: torch.Tensor,
    supervised: torch.Tensor,
    decay: float = 0.8,
    *,
    skip_unsayable: bool = True,
) -> TokenLoss:
    """
    Soft cross-entropy `-sum p log q` of every unrolled step.

    Args:
        logits (`list` of `(B, n, Vd)`): Draft logits of step `k` at each root; step `k` follows `k` tokens of the text.
        teacher ([`Teacher`]): The target's distributions.
        roots (`torch.LongTensor` of shape `(B, n)`): Root positions `t`; step `k` is taught by the target at `t + k`.
        supervised (`torch.BoolTensor` of shape `(B, n, steps)`): See [`supervised_steps`].
        decay (`float`, *optional*, defaults to `0.8`): Step `k` weighs `decay**k`.
        skip_unsayable (`bool`, *optional*, defaults to `True`): Leave out positions whose most likely target token is
            outside the draft's vocabulary (EAGLE-3's position mask).
    """
    total, correct = logits[0].sum() * 0, []
    rows = torch.arange(len(roots), device=roots.device)[:, None]
    last = teacher.probs.shape[1] - 1
    for k, step_logits in enumerate(logits):
        column = (roots + k - teacher.first).clamp(0, last)
        wanted, top = teacher.probs[rows, column], teacher.top[rows, column]
        sayable, counted = teacher.sayable[rows, column], supervised[..., k]
        step_logits = step_logits.to(torch.promote_types(step_logits.dtype, torch.float32))
        # -sum p log q, with sum p = 1, without a tensor of log-probabilities
        loss = step_logits.logsumexp(-1) - torch.linalg.vecdot(wanted.to(step_logits.dtype), step_logits)
        used = counted & sayable if skip_unsayable else counted
        total = total + decay**k * loss.masked_fill(~used, 0).sum()
        with torch.no_grad():
            right = step_logits.gather(-1, top[..., None])[..., 0] == step_logits.amax(-1)
            correct.append((right & sayable & counted).sum())
    return TokenLoss(total, torch.stack(correct), supervised.flatten(0, 1).sum(0))
