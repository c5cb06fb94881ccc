# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3's token loss: soft cross-entropy over several unrolled steps (training-time test). Level 4.

Draft and target logits of a batch are the largest tensors of a step, so both are made for a few positions at a time, and
made again for the gradient. Source: Li et al. 2025, https://huggingface.co/papers/2503.01840; step weights `0.8**k` are the
released code's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from gto_hf.drafts import DraftModel

from .objectives import TOKEN_OBJECTIVES, TokenObjective
from .reading import Readout
from .step_weights import decay_weights


# Draft logits of all unrolled steps that exist at a time: 64 M numbers are 256 MB in float32.
LOSS_ELEMENTS = 2**26


@dataclass(frozen=True)
class TokenLoss:
    """
    Sums of one batch; divide `loss` by the number of roots in the whole batch.

    Attributes:
        loss (`torch.FloatTensor` scalar): Sum over roots and steps of the weighted loss, in nats.
        correct (`torch.LongTensor` of shape `(steps,)`): Roots whose most likely token was the target's.
        counted (`torch.LongTensor` of shape `(steps,)`): Supervised roots of each step.
        rows (`torch.FloatTensor` of shape `(B,)`): The loss of each row, detached.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    counted: torch.Tensor
    rows: torch.Tensor


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
    draft: DraftModel,
    features: list[torch.Tensor],
    readout: Readout,
    roots: torch.Tensor,
    supervised: torch.Tensor,
    decay: float = 0.8,
    *,
    skip_unsayable: bool = True,
    objective: str | TokenObjective = "kl",
    weights: torch.Tensor | None = None,
    of_outputs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    trained: torch.Tensor | None = None,
    elements: int = LOSS_ELEMENTS,
    largest: Callable[[int], int] = int,
) -> TokenLoss:
    """
    Loss between draft and target distributions at every unrolled step; with `"kl"` the soft cross-entropy `-sum p log q`.

    Args:
        draft ([`DraftModel`]): Its head turns `features` into logits.
        features (`list` of `(B, n, H)`): Draft outputs of step `k` at each root; step `k` follows `k` tokens of the text.
        readout ([`Readout`]): The target's logits. Its distribution is renormalised over the draft's vocabulary.
        roots (`torch.LongTensor` of shape `(B, n)`): Root positions `t`; step `k` is taught by the target at `t + k`.
        supervised (`torch.BoolTensor` of shape `(B, n, steps)`): See [`supervised_steps`].
        decay (`float`, *optional*, defaults to `0.8`): Step `k` weighs `decay**k`.
        skip_unsayable (`bool`, *optional*, defaults to `True`): Leave out positions whose most likely target token is
            outside the draft's vocabulary (EAGLE-3's position mask).
        objective (`str` or `Callable`, *optional*, defaults to `"kl"`): One of [`TOKEN_OBJECTIVES`], or a function like them.
        weights (`torch.FloatTensor` of shape `(B, n, steps)`, *optional*): Of each step of each root; by default `decay**k`.
        of_outputs (`Callable`, *optional*): A further loss `(steps, m)` of draft outputs `(steps, m, H)`, given with the row
            and slot `(m,)` that teach them; counts whatever the vocabulary says.
        trained (`torch.BoolTensor` of shape `(B, n, steps)`, *optional*): Those of `supervised` that have a loss; all by default.
        elements (`int`, *optional*): Draft logits that exist at a time. Bounds memory, changes no result.
        largest (`Callable`, *optional*): The largest of a number over all ranks that must call the head equally often, because
            it is split over them. By default every rank stands alone.
    """
    steps, kept = len(features), draft.kept_ids
    between = TOKEN_OBJECTIVES[objective] if isinstance(objective, str) else objective
    trained = supervised if trained is None else trained
    weights = decay_weights(supervised, decay) if weights is None else weights
    # One entry per taught slot, with the root that each step has there: the target's side is made once for all steps.
    batch, slots = len(roots), int(readout.last)
    column = torch.full((batch, slots + steps), -1, dtype=torch.long, device=roots.device)
    index = torch.arange(roots.shape[1], device=roots.device).expand_as(roots)
    column.scatter_(1, torch.where(supervised[..., 0], roots, slots + steps - 1), index)
    column[:, slots:] = -1
    row, slot = (_taught(roots, supervised, slots)).nonzero(as_tuple=True)
    outputs = torch.stack(features)
    # At least one part, so that a batch that teaches nothing still reaches every parameter.
    count = largest(max(1, -(-len(row) * steps * len(kept) // elements)))
    parts = list(zip(row.tensor_split(count), slot.tensor_split(count), strict=True))

    def part(outputs: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each row `(B,)` and right answers of each step."""
        some, normaliser, top = readout.kept(row, slot, kept)
        best = draft.to_draft_ids(top)
        at = slot - torch.arange(steps, device=slot.device)[:, None]  # (steps, n): each step's root
        number = torch.where(at >= 0, column[row, at.clamp(min=0)], -1)
        step = torch.arange(steps, device=slot.device)[:, None].expand_as(number)
        counted = (number >= 0) & supervised[row, number.clamp(min=0), step]
        chosen = outputs[step, row, number.clamp(min=0)]
        logits = draft.head(chosen)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        with torch.autocast(logits.device.type, enabled=False):  # sums over a vocabulary need float32
            loss = between(logits, some.to(logits.dtype), normaliser.to(logits.dtype))
            learnt = counted & trained[row, number.clamp(min=0), step]
            used = learnt & (best >= 0) if skip_unsayable else learnt
            weight = weights[row, number.clamp(min=0), step].to(logits.dtype)
            each = (weight * loss.masked_fill(~used, 0)).sum(0)
            if of_outputs is not None:
                each = each + (weight * of_outputs(chosen, row, slot).to(logits.dtype).masked_fill(~learnt, 0)).sum(0)
        with torch.no_grad():
            right = logits.gather(-1, best.clamp(min=0).expand(steps, -1)[..., None])[..., 0] == logits.amax(-1)
            correct = (right & (best >= 0) & counted).sum(1)
        return each.new_zeros(batch).index_add(0, row, each), correct

    total = outputs[..., 0].to(torch.promote_types(outputs.dtype, torch.float32)).sum((0, 2)) * 0
    correct = torch.zeros(steps, dtype=torch.long, device=roots.device)
    for row, slot in parts:
        if len(parts) == 1:
            loss, right = part(outputs, row, slot)
        else:
            loss, right = checkpoint(part, outputs, row, slot, use_reentrant=False)
        total, correct = total + loss, correct + right
    return TokenLoss(total.sum(), correct, supervised.flatten(0, 1).sum(0), total.detach())


def _taught(roots: torch.Tensor, supervised: torch.Tensor, slots: int) -> torch.Tensor:
    """`(B, slots)` bool: slots whose next token some step of some root is asked for."""
    taught = torch.zeros(len(roots), slots + 1, dtype=torch.bool, device=roots.device)
    for k in range(supervised.shape[-1]):
        taught.scatter_(1, torch.where(supervised[..., k], roots + k, slots).clamp(max=slots), True)
    return taught[:, :slots]
