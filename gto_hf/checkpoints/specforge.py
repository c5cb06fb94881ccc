# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 heads of SpecForge, as trained or exported for Hugging Face or SGLang. Level 3.

SafeAILab's names, `eagle_config` with layers whose output is meant. Its `norm_output` changed its meaning: it once said
whether the head's input is normed at all, and now whether the fed-back feature is.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from .eagle3_file import Eagle3File, architecture, is_eagle3


DIALECT = "SpecForge"


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """By SafeAILab's names together with the architecture's name or the field that SafeAILab's files lack."""
    named = any(name.startswith("midlayer.") for name in tensors)
    own = architecture(config).endswith("Eagle3") or "eagle_config" in config
    return own and named and is_eagle3(tensors) and not any(name.startswith("aux_norm_") for name in tensors)


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
    if file.flag("norm_output") and file.said.get("norm_output") is None:
        raise DraftCheckpointError(
            f"`config.json` of `{source}` says `norm_output=True`, which SpecForge up to 0.3 wrote for ordinary EAGLE-3 and "
            "later versions (from September 2026 on) for a normed output. Pass `norm_output=False` for the former, "
            "`norm_output=True` for the latter."
        )
    if file.flag("norm_output") is False:
        file.note("`norm_output=False` is ordinary EAGLE-3: what SpecForge up to 0.3 meant by it, no engine serves")
    inner = config.get("eagle_config") or {}
    return file.finish(
        layers=file.feature_layers(inner.get("eagle_aux_hidden_state_layer_ids"), 1, feature_layers, target_layers),
        rope=file.rope(),
        trained_length=config.get("trained_length", config.get("max_position_embeddings")),
    )
