# SPDX-License-Identifier: Apache-2.0
"""Calls before the timed ones: what they pay for must not stand in anybody's seconds. Level 5."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from gto_hf.decoding import context_range


if TYPE_CHECKING:
    from .bench import System

WARM_TOKENS = 8


class _Enough(StoppingCriteria):
    """Ends a call early. A smaller `max_new_tokens` would leave a cache of fixed size less room than the timed calls have."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Whether each row is long enough."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._length, device=input_ids.device)


class WarmUp:
    """
    Lets every system decode a few tokens before it is timed, as first calls pay for allocations. An automatic tree measures
    its costs in the first call of every context range, so it is warmed once in each.

    Args:
        call (`Callable`): `call(system, prompt)` answers a prompt with the options of the timed calls.
    """

    def __init__(self, call: Callable[[System, list[int]], Any]) -> None:
        self._call = call
        self._done: set[tuple[str, int | None]] = set()

    def __call__(self, systems: Iterable[System], prompt: list[int]) -> None:
        """Warm those of `systems` that have not been warmed for a prompt of this length."""
        for system in systems:
            key = system.name, context_range(len(prompt)) if system.automatic else None
            if key not in self._done:
                self._done.add(key)
                enough = {"stopping_criteria": [_Enough(len(prompt) + WARM_TOKENS)]}
                self._call(replace(system, kwargs={**system.kwargs, **enough}), prompt)
