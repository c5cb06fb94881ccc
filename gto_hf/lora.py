# SPDX-License-Identifier: Apache-2.0
"""LoRA on drafts: which layers, and what a reference draft is under an adapter. Level 3; `checkpoints/` reads them."""

from __future__ import annotations

import copy
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from gto_hf.drafts import DraftModel, reference_copy
from gto_hf.target import is_hub_id


# Linear layers of each draft type that LoRA adapts unless told otherwise; the head is left to the target's rows.
LORA_TARGETS: dict[str, list[str]] = {
    "eagle3": ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "eagle": ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "griffin": ["fc.fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "causal_lm": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def is_peft(model: nn.Module) -> bool:
    """Whether `model` is a PEFT wrapper."""
    return hasattr(model, "get_base_model") and hasattr(model, "disable_adapter")


def draft_peft_config(config: Any, draft: DraftModel) -> Any:
    """
    A copy of a PEFT config that fits a draft: default `target_modules`, no language-model task type, and the revision of
    a base draft from the Hub.

    Raises:
        ValueError: For prompt learning, and for `bias` other than `"none"` (switching the adapter off would not restore
            the reference).
    Warns:
        If the draft came from no folder or repository, so that the adapter will name no base.
    """
    config = copy.deepcopy(config)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(f"{type(config).__name__} learns a prompt, but a draft has none. Use a LoRA-like adapter.")
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f'`bias="{config.bias}"` trains biases that stay when the adapter is switched off, so the reference draft '
            'would move. Use `bias="none"`.'
        )
    config.task_type = None
    if getattr(config, "target_modules", None) is None and hasattr(config, "target_modules"):
        config.target_modules = list(LORA_TARGETS[draft.config.draft_type])
    if not draft.name_or_path:
        warnings.warn(
            "This draft was made in memory, so its adapter will name no base draft. Save the draft, and train on "
            "`AutoDraft.from_pretrained(<that folder or Hub id>)`, or keep it to load the adapter with `base=`."
        )
    config.revision = config.revision or getattr(draft.config, "_commit_hash", None)
    return config


def hub_base(model: nn.Module) -> str | None:
    """Hub id of the base draft that a PEFT model's adapter names; None for a folder or if it names none."""
    name = model.active_peft_config.base_model_name_or_path
    return name if is_hub_id(name) and not os.path.isdir(name) else None


class Reference:
    """
    The frozen draft M0, as it was when training started.

    Args:
        model (`DraftModel` or `PeftModel`): The draft to be trained.
        fresh_adapter (`bool`): An adapter will be put on `model`; M0 is then the draft with the adapter off and costs no
            memory. Otherwise M0 is a copy, adapters included.
    """

    def __init__(self, model: nn.Module, *, fresh_adapter: bool) -> None:
        self._copy = None if fresh_adapter else reference_copy(model)

    def prepare(self, device: Any) -> None:
        """Move a copy to the training device."""
        if self._copy is not None:
            self._copy.to(device)

    def draft(self, trained: DraftModel) -> DraftModel:
        """The module to call inside [`context`]."""
        if self._copy is None:
            return trained
        draft = self._copy.get_base_model() if is_peft(self._copy) else self._copy
        # DeepSpeed casts the trained draft; equal drafts must give equal trees.
        return draft if draft.dtype == trained.dtype else draft.to(trained.dtype)

    def context(self, model: nn.Module) -> AbstractContextManager:
        """Within it [`draft`] is M0. `model` is the unwrapped trained model."""
        return model.disable_adapter() if self._copy is None else nullcontext()
