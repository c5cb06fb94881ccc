# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads spelled as SGLang's model has them, old names of its norms included. Level 3.

Layers are counted; layer ids name layers whose output is meant. `norm_output` means what it means here.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .eagle3_file import Eagle3File, architecture, is_eagle3


DIALECT = "SGLang"


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By the old norms, or counted layers with the architecture's name or `eagle_config`."""
    old = any(name.startswith("aux_norm_") for name in tensors)
    counted = any(name.startswith("layers.0.") for name in tensors)
    own = architecture(config).endswith("Eagle3") or "eagle_config" in config
    return is_eagle3(tensors) and (old or counted and own)


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
    return file.finish(
        layers=file.feature_layers(inner.get("eagle_aux_hidden_state_layer_ids"), 1, feature_layers, target_layers),
        rope=file.rope(),
        norm_output=bool(file.flag("norm_output")),
        trained_length=config.get("trained_length"),
    )
