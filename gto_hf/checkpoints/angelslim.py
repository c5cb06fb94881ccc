# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads of Tencent AngelSlim, in both of its spellings. Level 3.

Older files have SafeAILab's names and rotary embedding; newer ones count layers and may name the layers they read twice:
those whose output is meant (`aux_..`), and `hidden_states` indices (`eagle_aux_..`).
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from .eagle3_file import Eagle3File, architecture, is_eagle3
from .safeailab import trained_rope


DIALECT = "AngelSlim"
_OUTPUTS = ("aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids")
_BOUNDARIES = "eagle_aux_hidden_state_layer_ids"


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By its architecture's name or its own field."""
    own = architecture(config) == "Eagle3LlamaForCausalLM" or "target_model_type" in config
    return own and is_eagle3(tensors)


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
    older = any(name.startswith("midlayer.") for name in tensors)
    stated, shift = _ids(file, config)
    return file.finish(
        layers=file.feature_layers(stated, shift, feature_layers, target_layers),
        rope=trained_rope(file) if older else file.rope(),
        sliding_window=file.window(),
    )


def _ids(file: Eagle3File, config: dict[str, Any]) -> tuple[list[int] | None, int]:
    """The layer ids under either name, and what makes them `hidden_states` indices."""
    parts = (config, config.get("eagle_config") or {})
    outputs = next((part[name] for part in parts for name in _OUTPUTS if part.get(name) is not None), None)
    boundaries = next((part[_BOUNDARIES] for part in parts if part.get(_BOUNDARIES) is not None), None)
    if boundaries is None:
        return outputs, 1
    if outputs is not None and [i + 1 for i in outputs] != list(boundaries):
        raise DraftCheckpointError(
            f"`config.json` of `{file.source}` names layers {outputs} by their output and {boundaries} as `hidden_states` "
            "indices, which are not the same. Pass `feature_layers=` after repairing the config."
        )
    return boundaries, 0
