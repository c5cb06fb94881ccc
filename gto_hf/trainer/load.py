# SPDX-License-Identifier: Apache-2.0
"""Turning what a user gives [`GTOTrainer`] (objects, Hub ids, folders) into models and a tokenizer. Level 6."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.checkpoints import AutoDraft
from gto_hf.decoding import as_draft
from gto_hf.drafts import DraftModel
from gto_hf.target import text_config, unwrap

from .gto_config import GTOConfig


def load_draft(model: Any, args: GTOConfig) -> nn.Module:
    """
    The draft to train: a [`DraftModel`], a PEFT model around one, or something [`AutoDraft`] reads.

    Raises:
        TypeError: For anything else, naming what was given.
    """
    if isinstance(model, str):
        return AutoDraft.from_pretrained(model, **(args.model_init_kwargs or {}))
    if as_draft(model) is None:
        raise TypeError(
            f"`model` must be the draft to train (a DraftModel, a PEFT model around one, or a path), got "
            f"{type(model).__name__}. Make a fresh one with `Eagle3Draft.from_target(target)`; the frozen LLM goes into "
            "`target_model`."
        )
    return model


def load_target(target: Any, draft: DraftModel, args: GTOConfig) -> nn.Module:
    """
    The frozen target: an object, or loaded from `args` or from what the draft's config names. Evaluation mode, no
    gradients.
    """
    if target is None:
        target = args.target_model_name_or_path or (draft.config.target or {}).get("name_or_path")
    if target is None:
        raise ValueError(
            "`target_model` is needed: the draft's config names no target. Pass the model, or set "
            "`target_model_name_or_path`."
        )
    if isinstance(target, str):
        target = AutoModelForCausalLM.from_pretrained(target, **(args.target_model_init_kwargs or {}))
    return target.eval().requires_grad_(False)


def load_tokenizer(processing_class: Any, target: nn.Module) -> Any:
    """The given tokenizer, or the target's; with a pad token."""
    if processing_class is None:
        name = unwrap(target).config._name_or_path
        try:
            processing_class = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"No tokenizer found for the target `{name}`. Pass the target's tokenizer as `processing_class`."
            ) from error
    if processing_class.pad_token is None:
        processing_class.pad_token = processing_class.eos_token
    return processing_class


def eos_ids(target: nn.Module, tokenizer: Any, device: torch.device) -> torch.Tensor:
    """`(E,)` int64: every token that ends the target's generation."""
    ids: set[int] = set()
    generation = getattr(unwrap(target), "generation_config", None)
    for source in (generation, text_config(target), tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple)) else [] if found is None else [found])
    return torch.tensor(sorted(ids), dtype=torch.long, device=device)


def length(dataset: Any) -> int | None:
    """Rows of a dataset, or None for streams."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def check_rows(before: int | None, after: int | None, max_length: int | None) -> None:
    """
    Refuse a dataset that trains on nothing; say how much of it was dropped.

    Args:
        before, after (`int`, *optional*): Rows given, and rows with a trainable token; None for streams.
        max_length (`int`, *optional*): Where rows were cut.

    Raises:
        ValueError: If no row is left.
    """
    if before is None or after is None:
        return
    if after == 0:
        raise ValueError(
            f"All {before} rows of `train_dataset` are without a trainable token after cutting at "
            f"`max_length={max_length}`. Raise `max_length`, or check that labels (or the chat template's assistant mask) "
            "mark the answers."
        )
    if after < before:
        warnings.warn(
            f"{before - after} of {before} rows have no trainable token within `max_length={max_length}` and were "
            "dropped."
        )
