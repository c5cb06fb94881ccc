# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads of NeMo Automodel. Level 3.

The inner model's tensors carry `model.`. The config is the target's with fields added, so its number of layers is the
target's. Layer ids name layers whose output is meant. `norm_output` means what it means here.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .eagle3_file import Eagle3File


DIALECT = "NeMo Automodel"
_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "aux_layer_ids")


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By the prefix, which no other EAGLE-3 spelling has."""
    return "model.fc.weight" in tensors or "model.layers.0.hidden_norm.weight" in tensors


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
    inner = config.get("eagle_config") or {}
    stated = next((part[name] for part in (config, inner) for name in _IDS if part.get(name) is not None), None)
    if config.get("num_hidden_layers") not in (None, file.layer_count):
        file.note(
            f"`num_hidden_layers={config['num_hidden_layers']}` is the target's; the draft has {file.layer_count}"
        )
    return file.finish(
        layers=file.feature_layers(stated, 1, feature_layers, target_layers),
        rope=file.rope(),
        norm_output=bool(file.flag("norm_output")),
        counted=False,
    )
