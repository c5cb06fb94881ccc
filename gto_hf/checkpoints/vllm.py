# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads with a plain config as vLLM reads it. Level 3.

Flags and layer ids stand at the top of the config; the ids are `hidden_states` indices. `norm_output` means what it means
here.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .eagle3_file import Eagle3File, is_eagle3


DIALECT = "vLLM"


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Counted layers, and layer ids at the top of the config, where vLLM looks first."""
    counted = any(name.startswith("layers.0.") for name in tensors)
    return is_eagle3(tensors) and counted and "eagle_aux_hidden_state_layer_ids" in config


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Complete config and tensors of a draft; see [`safeailab.read`] for the arguments and errors."""
    file = Eagle3File(DIALECT, source, config, tensors, config.get("_said"))
    return file.finish(
        layers=file.feature_layers(config["eagle_aux_hidden_state_layer_ids"], 0, feature_layers, target_layers),
        rope=file.rope(),
        norm_before_residual=bool(file.flag("norm_before_residual")),
        norm_output=bool(file.flag("norm_output")),
        sliding_window=file.window(),
        trained_length=config.get("trained_length"),
    )
