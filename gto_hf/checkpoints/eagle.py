# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-1/2 and HASS in SafeAILab's layout, and a variant of HASS with three more norms. Level 3.

The config is a plain Llama one. Whether `fc` has a bias stands in its field `bias`, whose absence means true; the file's
own tensors decide.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .last_feature_file import draft_of


# Of the variant with norms.
_RENAMED = {
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.input_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
}
_ORIGINAL = {ours: theirs for theirs, ours in _RENAMED.items()}


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these are a draft of one `layers.0`, without a head or a norm on the feature, as EAGLE-3 has."""
    return (
        any(name.startswith("layers.0.") for name in tensors)
        and not any(name.startswith(("layers.1.", "fc.fc.", "fc.mlp.", "midlayer.")) for name in tensors)
        and not {"layers.0.hidden_norm.weight", "norm.weight", "d2t"} & set(tensors)
        and ("fc.weight" in tensors or "layers.0.input_layernorm.weight" not in tensors)
    )


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """
    Complete config and state dict of a draft.

    Args:
        source (`str`): For messages.
        config (`dict`): Their `config.json`.
        tensors (`dict[str, torch.Tensor]`): Their tensors.
        feature_layers (`list[int]`, *optional*): `[n]` for a target of `n` layers; their files do not say.
        target_layers (`int`, *optional*): `n`.

    Raises:
        DraftCheckpointError: Names missing tensors, contradicting sizes, or the missing argument.
    """
    norms = any(name in tensors for name in _RENAMED)
    bias, stated = "fc.bias" in tensors, config.get("bias", True)
    decided = () if bias == bool(stated) else (f"`fc` has {'a' if bias else 'no'} bias, as the tensors say",)
    ours = {_RENAMED.get(name, name): tensor for name, tensor in tensors.items()}
    return draft_of(
        "EAGLE-1/2 in SafeAILab's layout",
        source,
        config,
        ours,
        ("fc.weight", *(_RENAMED.values() if norms else ())),
        feature_layers,
        target_layers,
        lambda name: _ORIGINAL.get(name, name),
        decided,
        draft_type="eagle",
        fc_bias=bias,
        layernorms=norms,
    )
