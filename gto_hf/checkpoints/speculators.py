# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads of speculators, all versions. Level 3.

Flags stand at the top of the config, sizes in `transformer_layer_config`. Layer ids are `hidden_states` indices.
`norm_output` means what it means here.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from .eagle3_file import Eagle3File


DIALECT = "speculators"


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By the mark that every config of this project carries; `eagle` is another draft type."""
    return config.get("speculators_model_type") == "eagle3"


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Complete config and tensors of a draft; see [`safeailab.read`] for the arguments and errors."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DraftCheckpointError(
            f"`config.json` of `{source}` is speculators' but has no `transformer_layer_config`, which holds the sizes."
        )
    file = Eagle3File(DIALECT, source, layer, tensors, config.get("_said"), config)
    file.note(f"written by speculators {config.get('speculators_version', 'of unstated version')}")
    residual = file.flag("norm_before_residual")
    if residual is None:
        # The schema's own default is false, but the trainer's is true, and vLLM reads a missing field as true.
        residual = True
        file.note("`norm_before_residual` is not stated: true, as vLLM serves it", doubtful=True)
    return file.finish(
        layers=file.feature_layers(config.get("eagle_aux_hidden_state_layer_ids"), 0, feature_layers, target_layers),
        rope=file.rope(),
        norm_before_residual=residual,
        norm_output=bool(file.flag("norm_output")),
        sliding_window=file.window(),
        trained_length=config.get("trained_length"),
    )
