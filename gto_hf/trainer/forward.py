# SPDX-License-Identifier: Apache-2.0
"""Small things around the draft's forward inside a trainer. Level 6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """
    Remove what accelerate wraps around `forward` (autocast, and every output to float32), now and afterwards.

    The whole step runs under `accelerator.autocast` already, outputs stay in half precision, and the user gets the draft
    back as it came.
    """
    module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)


def at_least_two_columns(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch of one-token rows, padded on the right: a root needs a position before it to point at."""
    if inputs["input_ids"].shape[1] > 1:
        return inputs
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: nn.functional.pad(value, (0, 1), value=fill[name]) if name in fill else value
        for name, value in inputs.items()
    }


def without_repeats(inputs: dict[str, torch.Tensor], accelerator: Any) -> dict[str, torch.Tensor]:
    """
    An evaluation batch without the rows that fill up the last batch of several ranks, which would count twice.

    Counted as `gather_for_metrics` counts. A rank that has only such rows keeps one, with nothing to predict in it:
    every rank must run the same forwards.
    """
    state, rows = accelerator.gradient_state, len(inputs["input_ids"])
    if not state.end_of_dataloader or state.remainder <= 0:
        return inputs
    real = state.remainder - accelerator.process_index * rows
    if real >= rows:
        return inputs
    kept = {name: value[: max(real, 1)] for name, value in inputs.items()}
    return kept if real > 0 else {**kept, "labels": torch.full_like(kept["labels"], -100)}


def switch_off_dropout(model: nn.Module) -> None:
    """For good, functional dropout too: draft and reference must be one function at the first step."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
