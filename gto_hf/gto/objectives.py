# SPDX-License-Identifier: Apache-2.0
"""
Losses between a draft's and its target's next-token distributions, one number per position. Level 4, pure functions.

p is the target's distribution, q the draft's. `teacher` holds the target's logits of the draft's vocabulary, so
`softmax(teacher)` is p renormalised over it and `exp(teacher - normaliser)` is p itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kl(logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """
    Soft cross-entropy `-sum p log q`, p renormalised over the draft's vocabulary: KL up to a constant.

    Source: EAGLE-3, https://huggingface.co/papers/2503.01840.
    """
    return _SoftCrossEntropy.apply(logits, teacher.softmax(-1))


class _SoftCrossEntropy(torch.autograd.Function):
    """`-sum p log q`; keeps its gradient `q - p` instead of the two tensors it is made of."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Loss `(..,)` of `logits` `(.., V)` against probabilities `wanted` of a shape that broadcasts to theirs."""
        log_probs = logits.log_softmax(-1)
        loss = -torch.einsum("...v,...v->...", log_probs, wanted)  # a batched product: no tensor of all terms
        ctx.save_for_backward(log_probs.exp_().sub_(wanted))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Of the logits; the wanted distribution is the target's and has none."""
        (difference,) = ctx.saved_tensors
        return difference * gradient[..., None], None


def overlap(logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """`sum_v min(p, q)`: the probability that a sampled draft token is accepted by rejection sampling."""
    return torch.minimum((teacher - normaliser[..., None]).exp(), logits.softmax(-1)).sum(-1)


def lk(logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """`-log sum_v min(p, q)`. Source: LK losses, arXiv 2602.23881."""
    return -overlap(logits, teacher, normaliser).clamp(min=1e-8).log()


def lk_hybrid(logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor, eta: float = 3.0) -> torch.Tensor:
    """
    `l KL + (1 - l) TV` with `l = exp(-eta * overlap)`: KL where draft and target are far apart, total variation near.

    Source: LK losses, arXiv 2602.23881.
    """
    shared = overlap(logits, teacher, normaliser)
    mix = (-eta * shared.detach()).exp()
    return mix * kl(logits, teacher, normaliser) + (1 - mix) * (1 - shared)


TokenObjective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TOKEN_OBJECTIVES: dict[str, TokenObjective] = {"kl": kl, "lk": lk, "lk_hybrid": lk_hybrid}
