# SPDX-License-Identifier: Apache-2.0
"""
Group Tree Optimization for Hugging Face: train draft models for the tree they decode with.

Importing this package lets `generate` take a draft as `assistant_model` (see [`gto_hf.decoding.hook`]); `uninstall()`
undoes that. The trainer is imported on first use, so decoding needs no trl.
"""

from typing import TYPE_CHECKING, Any

from .checkpoints import AutoDraft
from .decoding import DecodingStatistics, TreeDecodeOutput, TreeDecoder, install, uninstall
from .drafts import CausalLMDraft, DraftCheckpointError, DraftConfig, DraftModel, Eagle3Draft, count_tokens
from .tree import TreeConfig


if TYPE_CHECKING:
    from .trainer import GTOConfig, GTOTrainer

__version__ = "0.1.0"

__all__ = [
    "AutoDraft",
    "CausalLMDraft",
    "DecodingStatistics",
    "DraftCheckpointError",
    "DraftConfig",
    "DraftModel",
    "Eagle3Draft",
    "GTOConfig",
    "GTOTrainer",
    "TreeConfig",
    "TreeDecodeOutput",
    "TreeDecoder",
    "count_tokens",
    "install",
    "uninstall",
]

install()


def __getattr__(name: str) -> Any:
    if name in ("GTOConfig", "GTOTrainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
