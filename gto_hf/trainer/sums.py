# SPDX-License-Identifier: Apache-2.0
"""Logged quantities as numerators and denominators, divided once, over all ranks and micro-batches. Level 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Sums:
    """
    Collects `(sum, count)` of means, and totals.

    The names are fixed at the start: every rank sends the same numbers in the same order, whatever its batches held.

    Args:
        means (`Sequence[str]`): Quantities that are logged as sum / count.
        totals (`Sequence[str]`): Quantities that are logged as they are.
    """

    def __init__(self, means: Sequence[str], totals: Sequence[str]) -> None:
        self._means = {name: torch.zeros(2, dtype=torch.float64) for name in means}
        self._totals = {name: torch.zeros((), dtype=torch.float64) for name in totals}

    def mean(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add to a quantity that is logged as total / count."""
        self._means[name] += torch.tensor([float(total), float(count)], dtype=torch.float64)

    def values(self, name: str, values: torch.Tensor) -> None:
        """Add every element of `values` to a mean."""
        self.mean(name, values.double().sum(), values.numel())

    def total(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a quantity that is logged as it is."""
        self._totals[name] += float(value)

    def waiting(self, name: str) -> float:
        """A total of this process that has not been logged yet."""
        return float(self._totals[name])

    def clear(self) -> None:
        """Start anew."""
        for tensor in (*self._means.values(), *self._totals.values()):
            tensor.zero_()

    def pop(self, accelerator: Any) -> dict[str, float]:
        """Totals and the means that have a count, summed over ranks; starts anew. Every rank must call it."""
        flat = torch.cat([*self._means.values(), *(t[None] for t in self._totals.values())])
        # Counts above 2^24 are not whole in float32; MPS has nothing wider.
        dtype = torch.float32 if torch.device(accelerator.device).type == "mps" else torch.float64
        flat = accelerator.reduce(flat.to(accelerator.device, dtype), reduction="sum").double().cpu()
        means = flat[: 2 * len(self._means)].view(-1, 2)
        logs = {name: (s / c).item() for name, (s, c) in zip(self._means, means, strict=True) if c > 0}
        if logs:  # an interval without anything counted logs nothing
            logs |= {n: v.item() for n, v in zip(self._totals, flat[2 * len(self._means) :], strict=True)}
        self.clear()
        return logs
