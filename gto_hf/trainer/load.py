# SPDX-License-Identifier: Apache-2.0
"""Turning what a user gives [`GTOTrainer`] (objects, Hub ids, folders) into models and a tokenizer. Level 6."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.checkpoints import AutoDraft
from gto_hf.decoding import as_draft
from gto_hf.drafts import DraftModel
from gto_hf.export import check_exportable
from gto_hf.target import (
    check_tree_support,
    fingerprint,
    is_hub_id,
    position_limit,
    text_config,
    tokenizer_hash,
    unwrap,
)
from gto_hf.tree import TreeConfig

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
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("Every parameter of the draft is frozen (`requires_grad=False`), so nothing would train.")
    return model


def load_target(target: Any, draft: DraftModel, args: GTOConfig) -> nn.Module:
    """
    The frozen target: an object, or loaded from `args` or from what the draft's config names. Evaluation mode, no
    gradients.

    Raises:
        ValueError: If there is none, or the draft could not be exported to `args.export_to`.
    """
    if target is None:
        target = args.target_model_name_or_path
    if target is None:
        target = (draft.config.target or {}).get("name_or_path")
        if not is_hub_id(target):
            raise ValueError(
                f"`target_model` is needed: the draft's config names no target on the Hub (found: {target!r}). Pass the "
                "model, or set `target_model_name_or_path`."
            )
    if isinstance(target, str):
        options = {"trust_remote_code": args.trust_remote_code, **(args.target_model_init_kwargs or {})}
        target = AutoModelForCausalLM.from_pretrained(target, **options)
    if as_draft(target) is not None:
        raise TypeError("`target_model` is a draft; it must be the frozen LLM. The draft goes into `model`.")
    if args.export_to is not None and draft is not None:
        check_exportable(draft.config, args.export_to, depth=fingerprint(target)["num_hidden_layers"])
    return target.eval().requires_grad_(False)


def name_target(draft: DraftModel, target: nn.Module) -> None:
    """
    Let the draft say which target it is trained for now, so that it warns for any other.

    A target without a name of its own (a local folder) may be the old one, so the old name is kept then. The tokenizer is
    compared by [`name_tokenizer`].
    """
    found, stored = fingerprint(target), draft.config.target or {}
    if not found["name_or_path"]:
        found |= {key: stored[key] for key in ("name_or_path", "revision") if key in stored}
    draft.config.target = {**stored, **found}


def name_tokenizer(draft: DraftModel, tokenizer: Any) -> None:
    """
    Let the draft say which tokenizer it is trained with.

    Warns:
        If it says another one: its rows may stand for other tokens.
    """
    if not draft.config.target:
        return
    found, stored = tokenizer_hash(tokenizer), draft.config.target.get("tokenizer")
    if stored is not None and stored != found:
        warnings.warn(
            "This draft was trained with another tokenizer: some ids stand for other tokens, or one of the two has more. If "
            "only tokens were added, training goes on from what the draft knows."
        )
    draft.config.target = {**draft.config.target, "tokenizer": found}


def load_tokenizer(
    processing_class: Any, target: nn.Module, draft: DraftModel | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The given tokenizer, or the target's; with a pad token, and named in the config of `draft`."""
    if processing_class is None:
        name = unwrap(target).config._name_or_path
        try:
            processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"No tokenizer found for the target `{name}`. Pass the target's tokenizer as `processing_class`."
            ) from error
    if processing_class.pad_token is None:
        processing_class.pad_token = processing_class.eos_token
    if draft is not None:
        name_tokenizer(draft, processing_class)
    return processing_class


def eos_ids(target: nn.Module, tokenizer: Any, device: torch.device) -> torch.Tensor:
    """`(E,)` int64: every token that ends the target's generation."""
    ids: set[int] = set()
    generation = getattr(unwrap(target), "generation_config", None)
    for source in (generation, text_config(target), tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple)) else [] if found is None else [found])
    return torch.tensor(sorted(ids), dtype=torch.long, device=device)


def check_devices(args: GTOConfig) -> None:
    """
    Refuse one process with several GPUs before a model is loaded: `Trainer` would copy the draft to all of them in every step
    (`nn.DataParallel`), and the copies would share one target.

    Raises:
        ValueError: Says how to start one process per GPU.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs, and `nn.DataParallel` cannot train a draft. Start one process per GPU (`accelerate "
            "launch --multi_gpu -m gto_hf train ..`, or your script instead of `-m gto_hf train`), or show it one GPU with "
            "`CUDA_VISIBLE_DEVICES=0`."
        )


def check_target_for_training(target: nn.Module, tree: TreeConfig, args: GTOConfig) -> None:
    """
    Refuse targets that trees cannot be scored on, and rows that would leave the target's positions.

    Raises:
        ValueError: If `gto_weight > 0` and the target or `max_length` does not allow trees.
    Warns:
        If only the token loss is trained, for a target that checks no trees.
    """
    try:
        check_tree_support(target)
    except ValueError as error:
        if args.gto_weight > 0:
            raise ValueError(f"{error} In training, `gto_weight=0` (token loss alone) does without trees.") from error
        warnings.warn(f"The draft can be trained, but `generate` checks no trees for this target: {error}")
        return
    limit = position_limit(target)
    if args.gto_weight > 0 and limit is not None and (args.max_length is None or args.max_length + tree.depth > limit):
        raise ValueError(
            f"The target's positions end or change at {limit}, and trees of depth {tree.depth} hang below rows of up to "
            f"`max_length={args.max_length}`. Set `max_length` to {limit - tree.depth} or less."
        )


def check_columns(dataset: Any, text_field: str, formatting_func: Any) -> None:
    """
    Refuse a dataset that has none of the columns TRL knows, before it is tokenised.

    Raises:
        ValueError: Names the columns found.
    """
    transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"  # its columns are not its rows'
    columns = None if transformed else getattr(dataset, "column_names", None)
    if columns and "seq_lengths" in columns:
        raise ValueError(
            "`train_dataset` is packed (it has `seq_lengths`), but a tree must not see another document. Pass it as it was before "
            "`pack_dataset`; rows are grouped by length with `train_sampling_strategy='group_by_length'`."
        )
    known = ("input_ids", "messages", "conversations", "prompt", text_field)
    if formatting_func is None and columns and not set(known) & set(columns):
        raise ValueError(
            f"`train_dataset` has the columns {sorted(columns)}; it needs `messages`, `conversations`, `prompt` and "
            f"`completion`, `{text_field}`, or `input_ids` (and `labels`). Rename them, or pass `formatting_func`."
        )
