# SPDX-License-Identifier: Apache-2.0
"""Switching activation checkpointing off for a while (TRL's context does it by names that transformers warns of). Level 6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_checkpointing(model: Any, kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """
    Within it the model recomputes nothing.

    Args:
        model (`PreTrainedModel` or `PeftModel`): As it is trained. kwargs (`dict`, *optional*): With which to switch it on again.
    """
    was_on = model.is_activation_checkpointing
    if was_on:
        model.activation_checkpointing_disable()
    try:
        yield
    finally:
        if was_on:
            model.activation_checkpointing_enable(kwargs)
