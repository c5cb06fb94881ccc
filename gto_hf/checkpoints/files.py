# SPDX-License-Identifier: Apache-2.0
"""Fetching the files of a checkpoint and reading its tensors without running anything in them. Level 3."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.utils import cached_file, extract_commit_hash

from gto_hf.drafts import DraftCheckpointError


_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_FLOATS = ("F16", "BF16", "F32", "F64")


def read_config(source: str, **hub: Any) -> dict[str, Any]:
    """
    `config.json` of a folder or Hub repository; of one that holds only an adapter, its `adapter_config.json`. The commit
    that a Hub repository was read at is added as `_commit_hash`.

    Raises:
        DraftCheckpointError: If there is no such folder, no config in it, or it is not JSON.
    """
    if not os.path.isdir(source) and (
        os.path.exists(source) or source.startswith((".", "/", "~")) or source.count("/") > 1
    ):
        raise DraftCheckpointError(f"`{source}` is neither a folder nor a Hub id (`name` or `owner/name`).")
    for name in ("config.json", "adapter_config.json"):
        path = _fetch(source, name, hub)
        if path is not None:
            break
    else:
        raise DraftCheckpointError(f"`{source}` has no `config.json`, so it is not a draft.")
    if name == "config.json" and os.path.isdir(source) and _fetch(source, "adapter_config.json", hub) is not None:
        raise DraftCheckpointError(
            f"`{source}` holds a whole draft and an adapter, and nothing says which of them is meant. Move the adapter "
            "(`adapter_config.json`, `adapter_model.safetensors`) to a folder of its own."
        )
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DraftCheckpointError(f"`{name}` of `{source}` is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DraftCheckpointError(f"`{name}` of `{source}` holds {type(config).__name__}, not a set of fields.")
    if name == "adapter_config.json" and "peft_type" not in config:
        raise DraftCheckpointError(f"`{name}` of `{source}` has no `peft_type`, so it is no LoRA adapter of a draft.")
    return {**config, "_commit_hash": extract_commit_hash(path, None)}


def lasting_name(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """
    What a checkpoint is called so that it is found again: Hub id and revision, or the absolute path of a folder.

    A folder inside the Hub's cache is the repository that it was downloaded from.
    """
    if not os.path.isdir(source):
        return source, revision
    path = os.path.abspath(source)
    found = re.search(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})$", path)
    return (found[1].replace("--", "/"), found[2]) if found else (path, None)


def read_tensors(source: str, **hub: Any) -> dict[str, torch.Tensor]:
    """
    All tensors of a folder or Hub repository, in one file or in many; safetensors first. Pickles are read with
    `weights_only=True`, so nothing in them runs.

    Raises:
        DraftCheckpointError: If there are none, or a file cannot be read as plain tensors.
    """
    for name in _WEIGHTS:
        path = _fetch(source, name, hub)
        if path is not None:
            return _sharded(source, name, path, hub) if name.endswith(".json") else _plain_tensors(source, name, path)
    raise _no_weights(source)


def _no_weights(source: str) -> DraftCheckpointError:
    return DraftCheckpointError(f"`{source}` holds no weights: none of {', '.join(f'`{n}`' for n in _WEIGHTS)}.")


def check_stored(source: str, **hub: Any) -> None:
    """
    Look at the headers of a draft's safetensors before anything is loaded: complete files, and floating-point weights.

    Raises:
        DraftCheckpointError: Names the file, and the tensor of the wrong kind.
    """
    name = "model.safetensors"
    path = _fetch(source, name, hub)
    if path is None:
        if all(_fetch(source, other, hub) is None for other in _WEIGHTS):
            raise _no_weights(source)
        return  # shards and pickles are checked as they are loaded
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                kind = file.get_slice(key).get_dtype()
                if key not in ("d2t", "t2d") and kind not in _FLOATS:
                    raise DraftCheckpointError(
                        f"`{key}` in `{name}` of `{source}` is stored as {kind}, which is no weight that can be read. Save "
                        "the draft again in a floating-point dtype."
                    )
    except SafetensorError as error:
        raise DraftCheckpointError(f"`{name}` of `{source}` cannot be read as plain tensors: {error}") from error


def _sharded(source: str, name: str, path: str, hub: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of all files that an index names; every tensor must be in the file that it names for it."""
    try:
        places = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DraftCheckpointError(
            f"`{name}` of `{source}` is not an index of tensors (no `weight_map`): {error}"
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if not isinstance(file, str) or os.path.basename(file) != file:
            raise DraftCheckpointError(f"`{name}` of `{source}` names {file!r}, which is no file beside it.")
        found = _fetch(source, file, hub)
        if found is None:
            raise DraftCheckpointError(f"`{name}` of `{source}` names `{file}`, and there is no such file.")
        part = _plain_tensors(source, file, found)
        wrong = sorted(
            {key for key in part if places.get(key) != file} | {k for k, f in places.items() if f == file} - set(part)
        )
        if wrong:
            raise DraftCheckpointError(f"`{file}` of `{source}` does not hold what `{name}` says: `{wrong[0]}`, ..")
        tensors.update(part)
    return tensors


def _plain_tensors(source: str, name: str, path: str) -> dict[str, torch.Tensor]:
    """Tensors of one file."""
    try:
        if name.endswith(".safetensors"):
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise DraftCheckpointError(f"`{name}` of `{source}` cannot be read as plain tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(t, torch.Tensor) for k, t in tensors.items()
    ):
        raise DraftCheckpointError(f"`{name}` of `{source}` is not a plain dictionary of tensors.")
    return tensors


def _fetch(source: str, name: str, hub: dict[str, Any]) -> str | None:
    """Local path of a file, downloaded if need be; None if the repository does not have it."""
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
