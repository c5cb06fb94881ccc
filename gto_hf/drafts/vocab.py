# SPDX-License-Identifier: Apache-2.0
"""Reduced draft vocabularies: which target tokens a draft may propose. Level 2, tensors only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def choose_draft_vocab(counts: torch.Tensor, size: int, always_keep: Iterable[int] = ()) -> torch.Tensor:
    """
    Pick the `size` target tokens a draft keeps: `always_keep` first, then by frequency, then by id.

    Args:
        counts (`torch.LongTensor` of shape `(V,)`): How often each target token occurs in the training text.
        size (`int`): Rows of the draft's head.
        always_keep (`Iterable[int]`): Special, added and byte-level tokens; rare in text, but structural.

    Returns:
        `torch.LongTensor` of shape `(size,)`: Kept target ids, ascending. Padded with unseen ids in id order when the
        text has fewer distinct tokens than `size`.

    Raises:
        ValueError: If `size` is not positive, above the vocabulary, or below the number of tokens to keep.
    """
    total = len(counts)
    if not 0 < size <= total:
        raise ValueError(f"`draft_vocab_size={size}` must lie between 1 and the target's vocabulary of {total}.")
    keep = torch.tensor(sorted({i for i in always_keep if 0 <= i < total}), dtype=torch.long)
    if len(keep) > size:
        raise ValueError(
            f"`draft_vocab_size={size}` is smaller than the {len(keep)} special tokens that must be kept. Raise it."
        )
    order = counts.double().clone()
    order[keep] = torch.inf
    best = order.sort(descending=True, stable=True).indices[:size]
    return best.sort().values


def count_tokens(rows: Iterable[Sequence[int] | torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Token frequencies of `rows` of target ids, `(vocab_size,)` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(torch.as_tensor(row, dtype=torch.long).flatten(), minlength=vocab_size)[:vocab_size]
    return counts


def vocab_buffers(kept: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The two tensors every EAGLE-3 checkpoint stores, from the kept target ids `(Vd,)`.

    Returns:
        `d2t` (`(Vd,)` int64, an **offset**: target id = `i + d2t[i]`) and `t2d` (`(V,)` bool, true for kept ids).
    """
    d2t = kept - torch.arange(len(kept), device=kept.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=kept.device)
    t2d[kept] = True
    return d2t, t2d


def check_vocab_buffers(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> None:
    """
    Check a stored draft vocabulary: ids in range, distinct, and equal to the mask.

    Raises:
        ValueError: Says which of the three is violated and by how many entries.
    """
    kept = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = int(((kept < 0) | (kept >= vocab_size)).sum())
    if outside:
        raise ValueError(
            f"`d2t` sends {outside} of {len(d2t)} draft tokens outside the target's vocabulary of {vocab_size}. It must "
            "hold offsets: target id = i + d2t[i]."
        )
    repeated = len(kept) - len(kept.unique())
    if repeated:
        raise ValueError(f"`d2t` sends {repeated} draft tokens to a target token that another one has already.")
    if t2d is not None and (int(t2d.sum()) != len(kept) or not bool(t2d[kept].all())):
        raise ValueError(
            f"`t2d` keeps {int(t2d.sum())} target tokens, `d2t` reaches {len(kept)}, {int(t2d[kept].sum())} in common. "
            "The two must agree."
        )
