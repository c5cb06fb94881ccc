# SPDX-License-Identifier: Apache-2.0
"""Which positions of a sequence are trained, and which of them form GTO's groups. Level 4."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def supervised_targets(
    labels: torch.Tensor, input_ids: torch.Tensor, eos_ids: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Positions whose token a draft is asked to predict.

    Position `p` counts if it is labelled, has a root with a target feature before it (`p >= 2`), and does not follow
    an end-of-sequence token: decoding never drafts there.

    Args:
        labels (`torch.LongTensor` of shape `(B, T)`): -100 where not supervised; unshifted, as collators give them.
        input_ids (`torch.LongTensor` of shape `(B, T)`): Tokens.
        eos_ids (`torch.LongTensor` of shape `(E,)`): The target's end-of-sequence ids.
        valid (`torch.BoolTensor` of shape `(B, T)`, *optional*): False for padding, on either side; none by default.

    Returns:
        `torch.BoolTensor` of shape `(B, T)`.
    """
    wanted = labels != -100
    valid = torch.ones_like(wanted) if valid is None else valid.bool()
    wanted &= valid & (valid.cumsum(1) > 2)
    wanted[:, 1:] &= ~torch.isin(input_ids[:, :-1], eos_ids)
    return wanted


def roots_of(targets: torch.Tensor) -> torch.Tensor:
    """`(B, T)` bool: positions `t` whose next token is one of `targets`; each is the root of one draft tree."""
    return torch.cat([targets[:, 1:], torch.zeros_like(targets[:, :1])], dim=1)


def padded_positions(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Positions of the true entries of each row of `(B, T)`, ascending.

    Returns:
        `positions` `(B, n)` int64 and `real` `(B, n)` bool; `n >= 1` is the largest number in a row, and what is not
        real is slot 1.
    """
    width = max(int(mask.sum(1).max()), 1)
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    real = mask.gather(1, order)
    return order.masked_fill(~real, 1), real


def _slots(row: torch.Tensor, size: int, generator: torch.Generator | None) -> list[int]:
    """First positions of the non-overlapping groups of `size` adjacent roots that fit into one row."""
    positions = row.nonzero()[:, 0].tolist()
    starts, run = [], 0
    for i, position in enumerate(positions):
        if i + 1 < len(positions) and positions[i + 1] == position + 1:
            continue
        length = i + 1 - run
        count, slack = divmod(length, size)
        if count:
            shift = 0
            if generator is not None and slack:
                shift = int(torch.randint(slack + 1, (1,), generator=generator))
            starts.extend(positions[run] + shift + size * j for j in range(count))
        run = i + 1
    return starts


def count_groups(roots: torch.Tensor, num_groups: int, group_size: int) -> int:
    """
    Groups that [`sample_groups`] will find in a batch, whatever its generator says.

    Args:
        roots (`torch.BoolTensor` of shape `(B, T)`): See [`roots_of`].
    """
    return sum(min(num_groups, len(_slots(row, group_size, None))) for row in roots.cpu())


def row_seeds(seed: int, step: int, input_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """
    `(B,)` int64 on the CPU: one seed per row, from the step and the row's own tokens.

    Where a row stands (in which batch, micro-batch or rank, behind how much padding) does not matter.

    Args:
        seed, step (`int`): Of the run, and the optimizer step.
        input_ids (`torch.LongTensor` of shape `(B, T)`): Tokens.
        valid (`torch.BoolTensor` of shape `(B, T)`): False for padding.
    """
    seeds = []
    for ids, real in zip(input_ids.cpu(), valid.cpu(), strict=True):
        digest = hashlib.sha256(f"{seed} {step} ".encode() + ids[real].numpy().tobytes()).digest()
        seeds.append(int.from_bytes(digest[:8], "little") >> 1)
    return torch.tensor(seeds, dtype=torch.long)


def row_generators(seeds: torch.Tensor) -> list[torch.Generator]:
    """One CPU generator for each of `seeds` `(B,)`; see [`row_seeds`]."""
    return [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]


def sample_groups(
    roots: torch.Tensor,
    num_groups: int,
    group_size: int,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Up to `num_groups` non-overlapping groups of `group_size` adjacent roots per row (K and m of Sec. 3.2).

    A group never bridges a gap in supervision, so it never holds two documents or turns.

    Args:
        roots (`torch.BoolTensor` of shape `(B, T)`): See [`roots_of`].
        generator (`torch.Generator` or one per row, *optional*): On CPU; the only randomness. See [`row_generators`]. None
            gives a fixed grid: a row has the same groups every time, evenly spread.

    Returns:
        `positions` `(B, G, m)` int64, ascending, and `valid` `(B, G)` bool. `G` is the largest number of groups of a
        row, at least 1; missing groups repeat position 1 and are not valid.

    Source: https://huggingface.co/papers/2509.22134, Sec. 3.2 and Alg. 1.
    """
    generators = generator if isinstance(generator, Sequence) else [generator] * len(roots)
    chosen = []
    for row, own in zip(roots.cpu(), generators, strict=True):
        slots = torch.tensor(_slots(row, group_size, own), dtype=torch.long)
        if own is None:
            count = min(num_groups, len(slots))
            chosen.append(slots[torch.arange(count) * len(slots) // max(count, 1)])
        else:
            chosen.append(slots[torch.randperm(len(slots), generator=own)[:num_groups]].sort().values)
    width = max(1, *(len(slots) for slots in chosen))
    valid = torch.tensor([[j < len(slots) for j in range(width)] for slots in chosen], dtype=torch.bool)
    starts = torch.ones(len(chosen), width, dtype=torch.long)
    for i, slots in enumerate(chosen):
        starts[i, : len(slots)] = slots
    step = torch.arange(group_size) * valid[..., None]
    return (starts[..., None] + step).to(roots.device), valid.view(len(chosen), width).to(roots.device)
