# SPDX-License-Identifier: Apache-2.0
"""
GRIFFIN's checkpoints. Level 3.

The config is a plain Llama one; its `bias` means nothing, because the joining layer always has one. Heads that were trained
with biases on queries, keys and values are read as well.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .last_feature_file import draft_of


_FUSION = (
    "fc.fc.bias",
    "fc.fc.weight",
    "fc.mlp.down_proj.weight",
    "fc.mlp.input_layernorm.weight",
    "fc.mlp.up_proj.weight",
    "fc.post_attention_layernorm.weight",
)


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a joining module stands where other drafts have a layer, or the layer writes two vectors."""
    down, norm = (tensors.get(f"layers.0.{n}.weight") for n in ("mlp.down_proj", "post_attention_layernorm"))
    double = down is not None and norm is not None and len(down) == 2 * len(norm)
    return double or any(name.startswith(("fc.fc.", "fc.mlp.")) for name in tensors)


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Complete config and state dict of a draft; arguments and errors as of the reader of EAGLE-1/2."""
    return draft_of("GRIFFIN", source, config, tensors, _FUSION, feature_layers, target_layers, draft_type="griffin")
