# SPDX-License-Identifier: Apache-2.0
"""Fetching the files of a checkpoint and reading its tensors without running anything in them. Level 3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import cached_file

from gto_hf.drafts import DraftCheckpointError


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def read_config(source: str, **hub: Any) -> dict[str, Any]:
    """`config.json` of a folder or Hub repository."""
    path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False, **hub)
    if path is None:
        raise DraftCheckpointError(f"`{source}` has no `config.json`, so it is not a draft (or not a model at all).")
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_tensors(source: str, **hub: Any) -> dict[str, torch.Tensor]:
    """All tensors of a folder or Hub repository, safetensors first; pickles are read with `weights_only=True`."""
    for name in _WEIGHTS:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
        if path is None:
            continue
        if name.endswith(".safetensors"):
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
            raise DraftCheckpointError(f"`{name}` of `{source}` is not a plain dictionary of tensors.")
        return tensors
    raise DraftCheckpointError(f"`{source}` holds none of {', '.join(_WEIGHTS)}.")
