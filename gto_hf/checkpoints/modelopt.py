# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads that NVIDIA ModelOpt exported. Level 3.

No `t2d`, and `d2t` in the order of frequency. Layer ids name layers whose output is meant; a head without any does not
follow EAGLE-3's rule. The export may state a yarn scaling that the training did not have.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from .eagle3_file import Eagle3File, is_eagle3


DIALECT = "ModelOpt"
_MARKS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular")
# What the exporter writes over default rotary parameters unless told otherwise.
_EXPORT_FACTOR = 32.0


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By `d2t` without `t2d` beside bare layer names, or by fields that only this project has."""
    marked = any(mark in (config.get("eagle_config") or {}) for mark in _MARKS)
    bare = any(name.startswith("layers.0.") for name in tensors)
    return is_eagle3(tensors) and bare and "t2d" not in tensors and (marked or "d2t" in tensors)


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
    if inner.get("use_aux_hidden_state") is False:
        raise DraftCheckpointError(
            f"`config.json` of `{source}` says `use_aux_hidden_state=False`: a head over the last layer alone is no EAGLE-3."
        )
    stated = inner.get("eagle_aux_hidden_state_layer_ids") or None
    rope = file.rope()
    if rope["rope_type"] == "yarn" and rope.get("factor") == _EXPORT_FACTOR:
        file.note(
            f"the yarn scaling by {_EXPORT_FACTOR:g} is the exporter's, for texts longer than the training's: left out (pass "
            "`rope_parameters=` to have it)"
        )
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    file.note(
        "the feature goes through `hidden_norm` alone, as vLLM and SGLang serve it; ModelOpt's own classes apply "
        "`input_layernorm` to it before"
    )
    return file.finish(layers=file.feature_layers(stated, 1, feature_layers, target_layers, rule=False), rope=rope)
