# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is that is no draft known here: a name for the error message. Level 3."""

from __future__ import annotations

import re
from typing import Any

import torch


# speculators' types of head that are read here.
_KNOWN_HEADS = ("eagle", "eagle3")
# Marks in tensors' names, most telling first.
_MARKS = (
    (r"^(module\.)?mask_hidden$", "a P-EAGLE head, which drafts in parallel"),
    (r"^medusa_head|^parallel_draft_heads\.|^\d+\.\d+\.linear\.", "a set of Medusa heads"),
    (r"(^|\.)eh_proj\.|^mtp\.", "a multi-token-prediction (MTP) layer of its target"),
    (r"\.kv_a_proj_with_mqa\.", "a head with DeepSeek's latent attention (MLA)"),
    (r"(\.experts\.|\.mlp\.gate\.)", "a head with experts"),
    (r"\.(weight_scale|weight_packed|qweight|scales)(_\d)?$", "a quantized checkpoint; load the unquantized one"),
)


def recognise(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str | None:
    """
    Name what a checkpoint is if it is certainly no draft that can be read here; None if it may be one.

    Args:
        config (`dict`): Its `config.json`.
        tensors (`dict[str, torch.Tensor]`): Its tensors.
    """
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in _KNOWN_HEADS:
        return f"a {kind} head of speculators"
    architecture = str(next(iter(config.get("architectures") or []), ""))
    if "dflash_config" in config or architecture.startswith("DFlash"):
        return "a DFlash head, which drafts blocks by diffusion"
    if any(re.search(r"\.lora_[AB]\.", name) for name in tensors):
        return "a LoRA adapter without its `adapter_config.json`"
    layers = {int(m[1]) for m in (re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name) for name in tensors) if m}
    if len(layers) > 1 and not any(
        name in tensors or f"model.{name}" in tensors for name in ("fc.weight", "fc.fc.weight")
    ):
        return (
            f"a language model of {len(layers)} layers ({architecture or config.get('model_type', 'of unknown type')}), not a "
            "draft; a small one is wrapped with `CausalLMDraft`"
        )
    for pattern, what in _MARKS:
        if any(re.search(pattern, name) for name in tensors):
            return what
    return None
