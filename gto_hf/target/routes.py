# SPDX-License-Identifier: Apache-2.0
"""
Which targets can check a tree, which only a chain, and which neither. Level 1; decided without a forward.

`tests/decoding/test_families.py` holds one tiny model per family against what is decided here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from .describe import text_config, unwrap
from .masks import check_backend, layer_kinds


# Layer types whose past a mask describes, or (`moe`, `mlp`) that have none.
_MASKED_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}
# Without the flag `_supports_attention_backend`, but found to honour a tree mask.
_VERIFIED = {"falcon", "stablelm", "biogpt"}


@dataclass(frozen=True)
class Route:
    """
    How a target is decoded with a draft.

    Attributes:
        kind (`str`): `"tree"`, or `"chain"` where siblings cannot share a position or a past.
        reason (`str`): Why not a tree; names the layer kind.
    """

    kind: str
    reason: str = ""


def decoding_route(target: nn.Module) -> Route:
    """
    Decide how a target can be decoded.

    Raises:
        ValueError: If it can check neither trees nor chains; names the layer kind.
    """
    model, config = unwrap(target), text_config(target)
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    refused = _refusal(model, parameters)
    if refused:
        raise ValueError(f"{name} {refused}. Call `generate` without `assistant_model`.")
    kinds = set(getattr(config, "layer_types", None) or [])
    if "conv" in kinds:
        return Route("chain", f"{name} has convolution layers, whose state follows one path")
    if getattr(config, "alibi", False) or "position_ids" not in parameters:
        return Route("chain", f"{name} takes positions from cache slots (ALiBi), which siblings cannot share")
    if "local" in (getattr(config, "attention_layers", None) or []):
        return Route("chain", f"{name} has local-attention layers that count cache slots")
    if not getattr(model, "_supports_attention_backend", False) and model.config.model_type not in _VERIFIED:
        return Route("chain", f"{name} is not known to honour a tree mask")
    return Route("tree")


def _refusal(model: nn.Module, parameters: object) -> str | None:
    """Why neither trees nor chains are possible, or None."""
    config = text_config(model)
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder; drafts are for decoder-only targets"
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - _MASKED_TYPES - {"conv"})
    if getattr(model, "_is_stateful", False):
        found = f" ({', '.join(unknown)} layers)" if unknown else ""
        return f"keeps a recurrent state{found} that cannot be rolled back, so drafted tokens cannot be rejected"
    if unknown:
        return f"has layers whose past cannot be masked or rolled back ({', '.join(unknown)})"
    if getattr(config, "cross_attention_layers", None):
        return "has cross-attention layers, which drafts do not support"
    if "cache" not in parameters or not getattr(model, "_supports_cache_class", True):
        return "keeps no cache that drafted tokens could be removed from"
    return None


def check_tree_support(target: nn.Module) -> None:
    """
    Refuse targets on which the training trees cannot be scored, before any forward.

    Raises:
        ValueError: For targets that check chains only or nothing, or whose attention backend takes no tree mask.
    """
    route = decoding_route(target)
    if route.kind != "tree":
        raise ValueError(f"{route.reason}, so no tree can be scored.")
    check_backend(target)


def has_windows(target: nn.Module) -> bool:
    """Whether some layers see only a window or a chunk of the past."""
    return not all(kind.is_full for kind in layer_kinds(target).values())
