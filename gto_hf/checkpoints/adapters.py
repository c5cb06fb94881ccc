# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters on disk: which draft they belong on, and that draft with the adapter merged in. Level 3."""

from __future__ import annotations

import os
from typing import Any

from gto_hf.drafts import DraftCheckpointError, DraftModel, check_loaded, check_values

from .files import ADAPTER_WEIGHTS, UNREADABLE, check_stored


def is_adapter(config: dict[str, Any]) -> bool:
    """Whether a folder's config is an adapter's."""
    return "peft_type" in config


def base_name(source: str, config: dict[str, Any]) -> str:
    """
    Folder or Hub id of the base draft that an adapter names.

    Args:
        source (`str`): The adapter's folder or Hub id, for messages.
        config (`dict`): Its `adapter_config.json`.

    Raises:
        DraftCheckpointError: If it names none, or a folder that is not here.
    """
    name = config.get("base_model_name_or_path")
    if not name:
        raise DraftCheckpointError(
            f"The adapter `{source}` names no base draft: the draft it was trained on came from no folder or repository. "
            "Pass that draft or its path as `base=`."
        )
    if os.path.isabs(name) and not os.path.isdir(name):
        raise DraftCheckpointError(
            f"The adapter `{source}` belongs on the draft in `{name}`, and there is no such folder here. Pass the base "
            "draft or its path as `base=`, or set `base_model_name_or_path` in its `adapter_config.json`."
        )
    return name


def merge_adapter(source: str, base: DraftModel, **hub: Any) -> DraftModel:
    """
    The base draft with an adapter merged into its weights. `base` is changed.

    Args:
        source (`str`): The adapter's folder or Hub id.
        base ([`DraftModel`]): The draft that the adapter was trained on.
        **hub: `revision`, `cache_dir`, `token`, .. for fetching the adapter.

    Raises:
        DraftCheckpointError: If the adapter does not fit the base, is incomplete, or cannot be merged.
    """
    from peft import PeftConfig, PeftModel

    check_stored(source, ADAPTER_WEIGHTS, **hub)
    try:
        model = PeftModel(base, PeftConfig.from_pretrained(source, **hub))
        found = model.load_adapter(source, "default", torch_device=str(base.device), **hub)
    except UNREADABLE as error:
        raise DraftCheckpointError(
            f"The adapter `{source}` cannot be put on the draft `{base.config.name_or_path}`: {error}"
        ) from error
    check_loaded(source, found.missing_keys, found.unexpected_keys)
    if not hasattr(model.base_model, "merge_and_unload"):
        raise DraftCheckpointError(
            f"The adapter `{source}` is of type {model.active_peft_config.peft_type.value}, which cannot be merged into a "
            "draft. Use a LoRA-like adapter."
        )
    merged = model.merge_and_unload()
    check_values(source, merged)
    return merged.eval()


def adapter_size(draft: DraftModel, config: Any) -> int:
    """Parameters that a fresh adapter of `config` ([`~peft.PeftConfig`]) adds to `draft`, which is changed."""
    from peft import get_peft_model

    before = draft.num_parameters()
    return get_peft_model(draft, config).get_base_model().num_parameters() - before
