# SPDX-License-Identifier: Apache-2.0
"""How much each unrolled step of each root counts in the token loss. Level 4."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gto_hf.drafts import DraftModel


STEP_WEIGHTS = ("decay", "dpace")

# Draft logits that exist at a time, as for the loss itself.
ELEMENTS = 2**26


def decay_weights(supervised: torch.Tensor, decay: float) -> torch.Tensor:
    """
    EAGLE-3's: step `k` (from 0) of every root weighs `decay**k`.

    Args:
        supervised (`torch.BoolTensor` of shape `(B, n, steps)`): Gives the shape, which is also the result's (float32).
    """
    steps = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return (decay**steps).expand(supervised.shape)


@torch.no_grad()
def dpace_weights(
    draft: DraftModel,
    features: list[torch.Tensor],
    input_ids: torch.Tensor,
    roots: torch.Tensor,
    supervised: torch.Tensor,
    decay: float,
    *,
    smoothing: float = 0.5,
    elements: int = ELEMENTS,
    largest: Callable[[int], int] = int,
) -> torch.Tensor:
    """
    D-PACE: step `k` weighs what the expected length of a chain of drafts gains by it.

    With `q_i` the draft's probability of the text's token at step `i`, smoothed to `s_i = (1 - a) q_i + a`, step `k` weighs
    `sum over m >= k of prod over i <= m of s_i`: much where the draft is likely to get that far and to go on from there. Scaled
    so that a draft that is always right gets the sum of `decay**k`; the paper divides by batch means instead, which would make
    the loss depend on how a batch is laid out.

    Args:
        draft ([`DraftModel`]): Its head turns `features` into logits.
        features (`list` of `(B, n, H)`): Draft outputs of each step at each root.
        input_ids (`torch.LongTensor` of shape `(B, T)`): The text; step `k` of root `t` is asked for token `t + 1 + k`.
        roots (`torch.LongTensor` of shape `(B, n)`): Root positions `t`.
        supervised (`torch.BoolTensor` of shape `(B, n, steps)`): Steps that exist; the others weigh 0.
        smoothing (`float`, *optional*, defaults to `0.5`): `a`; the paper's.
        elements (`int`, *optional*): Draft logits that exist at a time. Bounds memory, changes no result.
        largest (`Callable`, *optional*): See [`token_loss`].

    Returns:
        `torch.FloatTensor` of shape `(B, n, steps)`, without gradient.

    Source: https://huggingface.co/papers/2605.18810.
    """
    outputs = torch.stack(features)
    steps = len(outputs)
    row, root, step = supervised.nonzero(as_tuple=True)
    text = draft.to_draft_ids(input_ids[row, roots[row, root] + 1 + step])
    said = torch.zeros(supervised.shape, dtype=torch.float32, device=roots.device)
    count = largest(max(1, -(-len(row) * len(draft.kept_ids) // elements)))
    for b, r, k, token in zip(*(x.tensor_split(count) for x in (row, root, step, text)), strict=True):
        logits = draft.head(outputs[k, b, r]).float()
        own = logits.gather(-1, token.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
        said[b, r, k] = own.exp() * (token >= 0)  # what the draft cannot say has no probability
    reached = ((1 - smoothing) * said + smoothing).cumprod(-1) * supervised
    gained = reached.flip(-1).cumsum(-1).flip(-1) * supervised
    return gained * (sum(decay**k for k in range(steps)) / (steps * (steps + 1) / 2))
