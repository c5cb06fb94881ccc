# SPDX-License-Identifier: Apache-2.0
"""Logged quantities as numerators and denominators, divided once, over all ranks and micro-batches. Level 6."""

from __future__ import annotations

import torch


class Sums:
    """Collects `name -> (sum, count)`; a mean over a log interval is `sum / count`, a total has no count."""

    def __init__(self) -> None:
        self._means: dict[str, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}

    def mean(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add to a quantity that is logged as total / count."""
        pair = torch.stack([torch.as_tensor(total).detach().double().cpu(), torch.as_tensor(count).double().cpu()])
        self._means[name] = self._means.get(name, 0) + pair

    def values(self, name: str, values: torch.Tensor) -> None:
        """Add every element of `values` to a mean."""
        self.mean(name, values.double().sum(), values.numel())

    def total(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a quantity that is logged as it is."""
        self._totals[name] = self._totals.get(name, 0) + torch.as_tensor(value).detach().double().cpu()

    def pop(self, accelerator: object) -> dict[str, float]:
        """All logged values, summed over ranks; starts anew. Every rank must call it with the same names."""
        names, totals = sorted(self._means), sorted(self._totals)
        if not names and not totals:
            return {}
        flat = torch.stack([*(x for n in names for x in self._means[n]), *(self._totals[n] for n in totals)])
        flat = accelerator.reduce(flat.to(accelerator.device, torch.float32), reduction="sum").double().cpu()
        means = flat[: 2 * len(names)].view(-1, 2)
        logs = {name: (s / c).item() for name, (s, c) in zip(names, means, strict=True) if c > 0}
        logs.update({name: value.item() for name, value in zip(totals, flat[2 * len(names) :], strict=True)})
        self._means, self._totals = {}, {}
        return logs
