# SPDX-License-Identifier: Apache-2.0
"""An unchanged target as seen by drafts, decoding and training (level 1)."""

from .describe import (
    boundary_features,
    config_fingerprint,
    default_feature_layers,
    embed_raw,
    embedding_scale,
    final_norm,
    final_norm_scale,
    fingerprint,
    is_hub_id,
    position_limit,
    rope_types,
    text_config,
    unwrap,
    weights_hash,
)
from .device import find_device
from .head import LogitHead, find_head, target_head
from .masks import LayerKind, backend_form, backend_mask, check_backend, layer_kinds, tree_attention, visible_by_kind
from .routes import Route, check_tree_support, decoding_route, has_windows
from .shards import full_shape, gathered, unsplit_loading
from .vocabulary import find_tokenizer, tokenizer_hash, tokenizer_rows


__all__ = [
    "boundary_features",
    "LayerKind",
    "LogitHead",
    "Route",
    "backend_form",
    "backend_mask",
    "check_backend",
    "check_tree_support",
    "config_fingerprint",
    "decoding_route",
    "default_feature_layers",
    "embed_raw",
    "embedding_scale",
    "final_norm",
    "final_norm_scale",
    "find_device",
    "find_head",
    "find_tokenizer",
    "fingerprint",
    "full_shape",
    "gathered",
    "has_windows",
    "is_hub_id",
    "layer_kinds",
    "position_limit",
    "rope_types",
    "target_head",
    "text_config",
    "tokenizer_hash",
    "tokenizer_rows",
    "tree_attention",
    "unsplit_loading",
    "unwrap",
    "visible_by_kind",
    "weights_hash",
]
