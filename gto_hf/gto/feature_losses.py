# SPDX-License-Identifier: Apache-2.0
"""
Token losses of drafts that predict the target's features: EAGLE-1/2, HASS and GRIFFIN. Level 4.

All are a regression of the target's next last hidden state plus soft cross-entropy of what the target's head makes of it;
HASS unrolls it and adds the target's likeliest tokens, GRIFFIN leaves out steps that follow a token it would not have
drafted. Sources: https://huggingface.co/papers/2401.15077, 2408.15766 and 2502.11018, with the weights of the released
code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from gto_hf.drafts import DraftModel

from .objectives import kl
from .reading import Readout
from .sequences import Sequences
from .token_loss import LOSS_ELEMENTS, TokenLoss, token_loss


@dataclass(frozen=True)
class FeatureLoss:
    """
    Weights of one step: `feature_weight * smooth_l1 + token_weight * soft_ce + topk_weight * topk_ce`.

    Attributes:
        steps (`int`): Unrolled steps, unless told otherwise. No gradient flows from one into the features of another.
        feature_weight (`float`): Of smooth L1 between predicted and true feature, the mean over their `H` numbers.
        token_weight (`float`): Of `-sum p log q` over the draft's vocabulary.
        topk_weight (`float`): Of `-sum p log q` over the target's `topk_tokens` likeliest tokens, `p` not renormalised.
        topk_tokens (`int`): K.
        align_top (`int`): Leave out steps that follow a token which was not among the draft's so many likeliest one step
            before, and all steps behind them; 0 keeps all.
        noise (`float`): Width of the uniform noise on the features that the draft reads, see [`noisy`].
    """

    steps: int = 1
    feature_weight: float = 1.0
    token_weight: float = 0.1
    topk_weight: float = 0.0
    topk_tokens: int = 10
    align_top: int = 0
    noise: float = 0.0

    def of_tokens(self, logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """
        Loss between two distributions `(steps, n)` from the draft's logits `(steps, n, Vd)`; see [`TOKEN_OBJECTIVES`].

        Of a reduced vocabulary only the tokens that the draft can say are among the likeliest.
        """
        loss = self.token_weight * kl(logits, teacher, normaliser)
        if self.topk_weight == 0:
            return loss
        best, ids = teacher.topk(min(self.topk_tokens, teacher.shape[-1]))
        said = logits.gather(-1, ids.expand(*logits.shape[:-1], -1)) - logits.logsumexp(-1, keepdim=True)
        return loss - self.topk_weight * ((best - normaliser[..., None]).exp() * said).sum(-1)

    def of_features(self, predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Loss `(steps, n)` of predicted features `(steps, n, H)` for the true ones `(n, H)`, at least in float32."""
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        wanted = wanted.to(predicted.device, predicted.dtype).expand_as(predicted)
        return self.feature_weight * F.smooth_l1_loss(predicted, wanted, reduction="none").mean(-1)


# The recipes, with their published weights.
FEATURE_OBJECTIVES: dict[str, FeatureLoss] = {
    "eagle": FeatureLoss(noise=0.2),
    "hass": FeatureLoss(steps=3, topk_weight=1.0),
    "griffin": FeatureLoss(steps=2, topk_weight=0.5, align_top=3),
}


def feature_token_loss(
    draft: Any,
    outputs: list[torch.Tensor],
    readout: Readout,
    roots: torch.Tensor,
    supervised: torch.Tensor,
    recipe: FeatureLoss,
    sequences: Sequences,
    decay: float = 1.0,
    *,
    skip_unsayable: bool = True,
    elements: int = LOSS_ELEMENTS,
    largest: Callable[[int], int] = int,
) -> TokenLoss:
    """
    [`token_loss`] of a [`LastFeatureDraft`] by a recipe.

    A step of a root is one of HASS's passes at one position: it sees true features up to the root and drafted ones below.

    Args:
        outputs (`list` of `(B, n, W)`): See [`token_loss`]; unrolled without gradient between the steps.
        recipe ([`FeatureLoss`]): What is summed.
        sequences ([`Sequences`]): True tokens and features; the root at slot `t` is asked for the feature of slot `t`.
        skip_unsayable (`bool`): Leaves out the loss between distributions, never that of the features.
    """
    trained = supervised
    if recipe.align_top:
        trained = aligned_steps(
            draft,
            outputs,
            sequences.input_ids,
            roots,
            supervised,
            recipe.align_top,
            elements=elements,
            largest=largest,
        )
    return token_loss(
        draft,
        outputs,
        readout,
        roots,
        supervised,
        decay,
        skip_unsayable=skip_unsayable,
        objective=recipe.of_tokens,
        of_outputs=lambda chosen, row, slot: recipe.of_features(
            draft.next_feature(chosen), sequences.features[row, slot]
        ),
        trained=trained,
        elements=elements,
        largest=largest,
    )


@torch.no_grad()
def aligned_steps(
    draft: DraftModel,
    outputs: list[torch.Tensor],
    input_ids: torch.Tensor,
    roots: torch.Tensor,
    supervised: torch.Tensor,
    top: int,
    *,
    elements: int = LOSS_ELEMENTS,
    largest: Callable[[int], int] = int,
) -> torch.Tensor:
    """
    GRIFFIN's token-alignment mask: step `k` of a root counts if each of the `k` tokens it follows was among the draft's
    `top` likeliest at the step before. Where one was not, decoding would not have got there either.

    The released code tests the position of a step itself rather than the one before it; this is the paper's meaning.

    Args:
        outputs (`list` of `(B, n, W)`): Draft outputs of every step.
        input_ids (`torch.LongTensor` of shape `(B, T)`): The text.
        roots (`torch.LongTensor` of shape `(B, n)`), supervised (`(B, n, steps)` bool): See [`token_loss`].

    Returns:
        `torch.BoolTensor` of shape `(B, n, steps)`: `supervised` without what is not aligned.
    """
    if len(outputs) == 1:
        return supervised
    row, number, step = supervised[..., 1:].nonzero(as_tuple=True)
    token = draft.to_draft_ids(input_ids[row, roots[row, number] + 1 + step])
    before = torch.stack(outputs[:-1])
    hit = torch.zeros_like(supervised[..., 1:])
    count = largest(max(1, -(-len(row) * len(draft.kept_ids) // elements)))
    for some in torch.arange(len(row), device=row.device).tensor_split(count):
        logits = draft.head(before[step[some], row[some], number[some]])
        said = logits.gather(-1, token[some].clamp(min=0)[:, None])
        hit[row[some], number[some], step[some]] = ((logits > said).sum(-1) < top) & (token[some] >= 0)
    return supervised & torch.cat([torch.ones_like(hit[..., :1]), hit.cumprod(-1).bool()], dim=-1)


def noisy(sequences: Sequences, width: float) -> Sequences:
    """
    The sequences with uniform noise on their features, as EAGLE trains: within `width / 2 * 512 / tokens of the row`.

    Drawn from the global generator of the features' device.
    """
    if width == 0:
        return sequences
    features = sequences.features
    scale = width * 512 / sequences.valid.sum(1).clamp(min=1).to(features.device, features.dtype)
    return replace(sequences, features=features + (torch.rand_like(features) - 0.5) * scale[:, None, None])
