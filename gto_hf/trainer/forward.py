# SPDX-License-Identifier: Apache-2.0
"""Keeping a draft's `forward` its own while trainers wrap it. Level 6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
