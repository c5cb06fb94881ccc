# SPDX-License-Identifier: Apache-2.0
"""
Group Tree Optimization for Hugging Face: train draft models for the tree they decode with.

Importing this package lets `generate` take a draft as `assistant_model` (see [`gto_hf.decoding.hook`]); `uninstall()`
undoes that. The trainer and the evaluation are imported on first use, so decoding needs no trl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import hub  # noqa: F401 - a pushed draft gets its card
from .checkpoints import AutoDraft
from .decoding import (
    DecodingStatistics,
    RoundTrace,
    TreeDecodeOutput,
    TreeDecoder,
    install,
    record_rounds,
    uninstall,
)
from .drafts import CausalLMDraft, DraftCheckpointError, DraftConfig, DraftModel, Eagle3Draft, count_tokens
from .tree import CostCurve, TreeConfig


if TYPE_CHECKING:
    from .evaluation import check, draw_tree, misalignment, verify_lossless
    from .trainer import GTOConfig, GTOTrainer

__version__ = "0.1.0"

__all__ = [
    "AutoDraft",
    "CausalLMDraft",
    "CostCurve",
    "DecodingStatistics",
    "DraftCheckpointError",
    "DraftConfig",
    "DraftModel",
    "Eagle3Draft",
    "GTOConfig",
    "GTOTrainer",
    "RoundTrace",
    "TreeConfig",
    "TreeDecodeOutput",
    "TreeDecoder",
    "check",
    "count_tokens",
    "draw_tree",
    "install",
    "misalignment",
    "record_rounds",
    "uninstall",
    "verify_lossless",
]

install()


def __getattr__(name: str) -> Any:
    if name in ("GTOConfig", "GTOTrainer"):
        from . import trainer

        return getattr(trainer, name)
    if name in ("check", "draw_tree", "misalignment", "verify_lossless"):
        from . import evaluation

        return getattr(evaluation, name)
    if name in ("data", "evaluation", "trainer"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
