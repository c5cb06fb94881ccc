# SPDX-License-Identifier: Apache-2.0
"""
What tells one reference draft M0 from another (its weights, and what its config makes of them), and what is none yet. Level 6.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

from torch import nn
from trl.trainer.utils import hash_module

from gto_hf.decoding import as_draft
from gto_hf.drafts import DraftModel
from gto_hf.drafts.config import DraftConfig
from gto_hf.lora import is_peft

from .gto_config import GTOConfig


# Fields of `DraftConfig` that say where a draft comes from and how it is used, not what it computes.
_BOOKKEEPING = {"source", "target", "tree", "trained_length", "format_version"}
# Fields of Llama's config that the same tensors are read with.
_OF_LAYERS = {
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
}
# What configs inside it (of a language model, of an adapter) say about their files.
_OF_FILES = {
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "use_cache",
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
}


def reference_fingerprint(model: nn.Module) -> str:
    """
    A hash of everything that decides what a draft computes: equal weights with other feature layers, rotary angles or norms are
    another draft.

    Args:
        model (`DraftModel` or `PeftModel`): The draft, with its adapter if it has one.
    """
    config = as_draft(model).config
    facts: dict[str, Any] = {name: getattr(config, name) for name in _OF_LAYERS | set(DraftConfig.__annotations__)}
    facts = {name: value for name, value in facts.items() if name not in _BOOKKEEPING}
    facts["lm"] = _without_files(config.lm or {})
    if is_peft(model):
        facts["adapters"] = {name: _without_files(one.to_dict()) for name, one in model.peft_config.items()}
    text = json.dumps(
        facts, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )
    return hashlib.sha256((hash_module(model) + text).encode()).hexdigest()


def is_untrained(draft: DraftModel) -> bool:
    """Whether a draft was made by `from_target` and has seen no row since; drafts of other projects are taken as trained."""
    config = draft.config
    return draft.reads_features and config.trained_length is None and config.source is None


def warn_untrained(args: GTOConfig) -> None:
    """
    Warns:
        If a draft that has not been trained yet would be the reference M0.
    """
    if args.gto_weight > 0 and args.gto_objective == "gto":
        warnings.warn(
            f"The draft has not been trained yet, and `gto_weight={args.gto_weight:g}` makes it the reference M0: accepted paths are "
            "nearly empty, and the run is held close to a draft that knows nothing. Train Phase I first (`gto_weight=0`, at "
            "a higher `learning_rate`: 2e-3 in the quickstart), and start Phase II from the draft that it saves."
        )


def _without_files(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _OF_FILES}
