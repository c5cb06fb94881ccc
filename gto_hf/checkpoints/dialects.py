# SPDX-License-Identifier: Apache-2.0
"""The spellings of drafts that other projects write, in the order in which they are asked. Level 3."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from . import (
    angelslim,
    automodel,
    eagle,
    griffin,
    legacy_eagle,
    modelopt,
    safeailab,
    sglang,
    specforge,
    speculators,
    vllm,
)
from .strangers import recognise


class Dialect(Protocol):
    """What a module of `DIALECTS` offers."""

    def matches(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
        """Whether a checkpoint is spelled this way, by its tensors first and its config second."""

    def read(
        self,
        source: str,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        *,
        feature_layers: list[int] | None,
        target_layers: int | None,
    ) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
        """The complete config and all tensors in our names."""


# The first that matches reads. Drafts on the last hidden state come first, and SafeAILab's EAGLE-3 last: its files carry no
# mark of their own.
DIALECTS: list[Dialect] = [
    griffin,
    legacy_eagle,
    eagle,
    speculators,
    automodel,
    modelopt,
    angelslim,
    specforge,
    vllm,
    sglang,
    safeailab,
]


def find_dialect(source: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Dialect:
    """
    The dialect that a checkpoint is written in.

    Raises:
        DraftCheckpointError: If it is none; says what it is instead, where that can be told.
    """
    stranger = recognise(config, tensors)
    for dialect in DIALECTS:
        if stranger is None and dialect.matches(config, tensors):
            return dialect
    what = (
        f"it is {stranger}" if stranger else f"it holds {', '.join(f'`{name}`' for name in sorted(tensors)[:4])}, .."
    )
    raise DraftCheckpointError(
        f"`{source}` is no draft that gto-hf can read: {what}. Known are drafts saved by gto-hf and those in the spelling of "
        "SafeAILab, SpecForge, speculators, ModelOpt, AngelSlim, NeMo Automodel, vLLM and SGLang."
    )
