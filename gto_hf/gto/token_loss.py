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
        log_probs (`torch.FloatTensor` of shape `(B, T', Vd)`): Renormalised over the kept tokens.
        sayable (`torch.BoolTensor` of shape `(B, T')`): Whether the target's most likely token is kept.
        first (`int`): Sequence position of column 0.
    """

    log_probs: torch.Tensor
    sayable: torch.Tensor
    first: int


def make_teacher(logits: torch.Tensor, kept: torch.Tensor, t2d: torch.Tensor, first: int) -> Teacher:
    """
    Teacher from target `logits` `(B, T', V)` at positions `first, first + 1, ..`, for kept ids `(Vd,)`.

    The float32 copy holds the draft's vocabulary only.
    """
    whole = len(kept) == logits.shape[-1]
    some = logits if whole else logits.index_select(-1, kept)
    return Teacher(some.float().log_softmax(-1), t2d[logits.argmax(-1)], first)


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
    last = teacher.log_probs.shape[1] - 1
    for k, step_logits in enumerate(logits):
        column = (roots + k - teacher.first).clamp(0, last)
        wanted = teacher.log_probs[rows, column]
        sayable, counted = teacher.sayable[rows, column], supervised[..., k]
        step_logits = step_logits.to(torch.promote_types(step_logits.dtype, torch.float32))
        loss = -(wanted.exp() * step_logits.log_softmax(-1)).sum(-1)
        used = counted & sayable if skip_unsayable else counted
        total = total + decay**k * loss.masked_fill(~used, 0).sum()
        right = (step_logits.argmax(-1) == wanted.argmax(-1)) & sayable & counted
        correct.append(right.sum())
    return TokenLoss(total, torch.stack(correct), supervised.flatten(0, 1).sum(0))
