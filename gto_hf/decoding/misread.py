# SPDX-License-Identifier: Apache-2.0
"""Assistants that are drafts read as if they were language models: right text at no speed. Level 4."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from gto_hf.target import unwrap


# Fields that only configs of drafts have.
_FIELDS = (
    "draft_vocab_size",
    "truncated_vocab_size",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "speculators_model_type",
)


def refuse_misread(assistant: Any) -> None:
    """
    Refuse a plain language model that was built from a draft's folder: most of the draft's tensors were left out.

    Raises:
        ValueError: Names the folder and how to load it.
    """
    if not isinstance(assistant, nn.Module):
        return
    model = unwrap(assistant)
    if not isinstance(model, PreTrainedModel) or _has_fc(model):
        return
    config, name = model.config, model.config._name_or_path
    found = [field for field in _FIELDS if getattr(config, field, None) is not None]
    names = [a for a in config.architectures or [] if "eagle" in a.lower() or a.endswith("Speculator")]
    evidence = f"its config has `{found[0]}`" if found else f"its config says `{names[0]}`" if names else None
    if evidence is None and getattr(config, "num_hidden_layers", None) == 1 and _holds_fc(name):
        evidence = "it holds `fc.weight`"
    if evidence is not None:
        raise ValueError(
            f"`assistant_model` is a {type(model).__name__} built from `{name}`, which is a draft head ({evidence}), not a "
            f"language model: most of its weights were not read. Load it with `gto_hf.AutoDraft.from_pretrained({name!r}, "
            "target=model)`."
        )


def _has_fc(model: PreTrainedModel) -> bool:
    """Whether a model has the layer that fuses features, so it was read as what it is."""
    return any(hasattr(part, "fc") for part in (model, model.base_model))


def _holds_fc(name: str) -> bool:
    """Whether the weights in a folder or in the local cache have a fusing layer; only names are read."""
    for file in ("model.safetensors", "pytorch_model.bin"):
        try:
            path = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
            if path is None:
                continue
            if file.endswith(".bin"):
                keys = list(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            else:
                with safe_open(path, framework="pt") as tensors:
                    keys = list(tensors.keys())
        except Exception:  # whatever is there cannot be looked into: the stock checks go on
            return False
        return any(key.removeprefix("model.") in ("fc.weight", "fc.fc.weight", "fusion_fc.weight") for key in keys)
    return False
