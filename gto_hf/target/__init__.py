# SPDX-License-Identifier: Apache-2.0
"""An unchanged target as seen by drafts, decoding and training (level 1)."""

from .describe import (
    default_feature_layers,
    embed_raw,
    final_norm_scale,
    fingerprint,
    is_hub_id,
    position_limit,
    rope_types,
    text_config,
    unwrap,
)
from .masks import backend_mask, check_tree_support


__all__ = [
    "backend_mask",
    "check_tree_support",
    "default_feature_layers",
    "embed_raw",
    "final_norm_scale",
    "fingerprint",
    "is_hub_id",
    "position_limit",
    "rope_types",
    "text_config",
    "unwrap",
]
