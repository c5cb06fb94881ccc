# SPDX-License-Identifier: Apache-2.0
"""Parameters that DeepSpeed ZeRO-3 has split over ranks: their true shape, and all of them for a moment. Level 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.integrations import deepspeed as integration


def full_shape(weight: torch.Tensor) -> torch.Size:
    """Shape of a weight, also of one that is split over ranks (its own shape is `(0,)` then)."""
    return getattr(weight, "ds_shape", weight.shape)


@contextmanager
def gathered(*modules: nn.Module | None) -> Iterator[None]:
    """Within it every rank can read all parameters of `modules`. All ranks must enter it."""
    split = [p for m in modules if m is not None for p in m.parameters() if hasattr(p, "ds_id")]
    if not split:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(split):
        yield


@contextmanager
def unsplit_loading() -> Iterator[None]:
    """Within it `from_pretrained` splits nothing: drafts are small, are copied, and are split when training starts."""
    saved = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = saved
