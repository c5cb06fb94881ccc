# SPDX-License-Identifier: Apache-2.0
"""What is said before an adapter goes to the Hub. Level 6."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gto_hf.lora import hub_base, is_peft


class AdapterPushCallback(TrainerCallback):
    """Warns at a push if the adapter's base draft is not on the Hub, so that nobody else could load it."""

    def on_push_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the base that `adapter_config.json` names."""
        if model is None or not is_peft(model) or hub_base(model) is not None:
            return
        warnings.warn(
            f"This adapter's base draft is `{model.active_peft_config.base_model_name_or_path}`, which nobody else can "
            "load. Push the base draft first and train on `AutoDraft.from_pretrained(<its Hub id>)`, set "
            "`base_model_name_or_path` in `adapter_config.json` to it, or push the merged draft "
            "(`trainer.model.merge_and_unload().push_to_hub(...)`)."
        )
