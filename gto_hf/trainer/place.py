# SPDX-License-Identifier: Apache-2.0
"""Where the frozen target lives while a draft trains, for every backend. Level 6."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trl.models.utils import prepare_deepspeed

from gto_hf.target import unwrap

from .sharded import prepare_fsdp


def is_split(trainer: Any) -> bool:
    """Whether parameters are split over ranks, so that a forward of one rank needs all of them."""
    return trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3


def largest_over_ranks(trainer: Any, number: int) -> int:
    """The largest `number` of all ranks where they must do the same forwards; otherwise the rank's own."""
    if not is_split(trainer):
        return number
    return int(trainer.accelerator.gather(torch.tensor([number], device=trainer.accelerator.device)).max())


def place_target(target: nn.Module, trainer: Any) -> nn.Module:
    """
    Put the frozen target where training happens, with its weights and outputs in the dtype they were loaded in.

    - Quantized targets, and those with a device map, stay where they were loaded.
    - ZeRO-3 splits the target over the ranks. ZeRO-1 and -2 split optimizer states, of which it has none.
    - Otherwise every rank has the whole target on its device; FSDP2 splits the draft alone.

    Raises:
        ValueError: Under FSDP, see [`prepare_fsdp`].
    """
    accelerator = trainer.accelerator
    if trainer.is_fsdp_enabled:
        prepare_fsdp(trainer)
    if getattr(unwrap(target), "hf_quantizer", None) is not None or getattr(target, "hf_device_map", None) is not None:
        return target
    if is_split(trainer):
        # The module, not its engine: the hooks that gather parameters are the module's, and an engine hides the config.
        return prepare_deepspeed(target, accelerator).module
    # Not `accelerator.prepare_model`: in mixed precision it turns every output into float32.
    return target.to(accelerator.device)
