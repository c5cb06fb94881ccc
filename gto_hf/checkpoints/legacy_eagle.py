# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-1/2 and HASS as speculators wrote them up to 0.6 (`speculators_model_type: eagle`). Level 3.

Embedding and head are the verifier's. A stored `lm_head.weight` is a copy of the verifier's, which every engine leaves out.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftCheckpointError, DraftConfig

from .last_feature_file import draft_of


_NORMS = ("embedding_layernorm.weight", "layers.0.input_layernorm.weight", "pre_lm_head_layernorm.weight")
_PREFIXES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_ORIGINAL = {ours: theirs for theirs, ours in _PREFIXES.items()}


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the layer is called `transformer` and joined by `fusion_fc`, or the config says so."""
    parts = {name.split(".")[0] for name in tensors}
    return {"fusion_fc", "transformer"} <= parts or config.get("speculators_model_type") == "eagle"


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Complete config and state dict of a draft; arguments and errors as of the reader of EAGLE-1/2."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DraftCheckpointError(
            f"`{source}` reads as an EAGLE-1/2 draft of speculators, but its config has no `transformer_layer_config`."
        )
    ours = {_renamed(name, _PREFIXES): tensor for name, tensor in tensors.items()}
    head, decided = ours.get("lm_head.weight"), ()
    if head is not None and tuple(head.shape) == (layer.get("vocab_size"), layer.get("hidden_size")):
        del ours["lm_head.weight"]
        decided = ("`lm_head.weight` is left out: the head is the target's",)
    norms = any(name in ours for name in _NORMS)
    stated = config.get("layernorms")
    if stated is not None and bool(stated) != norms:
        raise DraftCheckpointError(
            f"The config of `{source}` says `layernorms={stated}`, but the file {'holds' if norms else 'lacks'} "
            f"{', '.join(f'`{_theirs(name)}`' for name in _NORMS if norms is (name in ours))}."
        )
    return draft_of(
        "an EAGLE-1/2 draft of speculators",
        source,
        layer,
        ours,
        ("fc.weight", *(_NORMS if norms else ())),
        feature_layers,
        target_layers,
        _theirs,
        decided,
        draft_type="eagle",
        fc_bias="fc.bias" in ours,
        layernorms=norms,
    )


def _theirs(name: str) -> str:
    return _renamed(name, _ORIGINAL)


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    """A name with its prefix replaced, if it is one of these."""
    prefix = next((old for old in prefixes if name.startswith(old)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)
