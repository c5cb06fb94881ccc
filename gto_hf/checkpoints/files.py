# SPDX-License-Identifier: Apache-2.0
"""Fetching the files of a checkpoint and reading its tensors without running anything in them. Level 3."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.utils import cached_file, extract_commit_hash, logging

from gto_hf.drafts import DraftCheckpointError


logger = logging.get_logger(__name__)

# In the order of transformers, which reads our own folders: a pickle that lies beside safetensors is the older one.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in the order of PEFT
# Kinds of numbers, by the names that safetensors has for them; of a map those of whole numbers and truth values.
_FLOATS = ("F16", "BF16", "F32", "F64")
_WHOLE = ("I64", "I32", "I16", "I8", "U8", "BOOL")
_KINDS = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What reading a damaged or hand-made pickle can raise.
UNREADABLE = (
    SafetensorError,
    UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
    LookupError,
    TypeError,
    AttributeError,
    struct.error,
)


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
    if not os.path.isdir(source) and os.path.isdir(os.path.dirname(source)):
        logger.warning(
            f"There is no folder `{source}` here, though there is `{os.path.dirname(source)}`: asking the Hub."
        )
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


def _no_weights(source: str, names: tuple[str, ...] = _WEIGHTS) -> DraftCheckpointError:
    return DraftCheckpointError(f"`{source}` holds no weights: none of {', '.join(f'`{n}`' for n in names)}.")


def check_stored(source: str, names: tuple[str, ...] = _WEIGHTS, **hub: Any) -> None:
    """
    Look at the files of one of our own drafts, or of an adapter, before it is loaded, since loading casts what is stored:
    complete files, floating-point weights, and a map of whole numbers.

    Raises:
        DraftCheckpointError: Names the file, and the tensor of the wrong kind.
    """
    for name in names:
        path = _fetch(source, name, hub)
        if path is None:
            continue
        for file, found in _files(source, name, path, hub):
            for key, kind in _kinds(source, file, found).items():
                if kind not in (_WHOLE if key in ("d2t", "t2d") else _FLOATS):
                    what = "map" if key in ("d2t", "t2d") else "weight"
                    raise DraftCheckpointError(
                        f"`{key}` in `{file}` of `{source}` is stored as {kind}, which is no {what} that can be read. Save "
                        "the draft again, with weights in a floating-point dtype and maps in whole numbers."
                    )
        return
    raise _no_weights(source, names)


def _kinds(source: str, name: str, path: str) -> dict[str, str]:
    """Kind of every tensor in a file; of safetensors only the header is read."""
    if not name.endswith(".safetensors"):
        return {key: _KINDS.get(t.dtype, str(t.dtype)) for key, t in _plain_tensors(source, name, path).items()}
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DraftCheckpointError(f"`{name}` of `{source}` cannot be read as plain tensors: {error}") from error


def _sharded(source: str, name: str, path: str, hub: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of all files that an index names; every tensor must be in the file that it names for it."""
    places = _places(source, name, path)
    tensors: dict[str, torch.Tensor] = {}
    for file, found in _files(source, name, path, hub):
        part = _plain_tensors(source, file, found)
        wrong = sorted(
            {key for key in part if places.get(key) != file} | {k for k, f in places.items() if f == file} - set(part)
        )
        if wrong:
            raise DraftCheckpointError(f"`{file}` of `{source}` does not hold what `{name}` says: `{wrong[0]}`, ..")
        tensors.update(part)
    return tensors


def _places(source: str, name: str, path: str) -> dict[str, Any]:
    """The file of every tensor, by an index."""
    try:
        places = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DraftCheckpointError(
            f"`{name}` of `{source}` is not an index of tensors (no `weight_map`): {error}"
        ) from error
    return places


def _files(source: str, name: str, path: str, hub: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and local path of every file with tensors: those that an index names, or the one."""
    if not name.endswith(".json"):
        yield name, path
        return
    for file in sorted(set(_places(source, name, path).values())):
        if not isinstance(file, str) or os.path.basename(file) != file:
            raise DraftCheckpointError(f"`{name}` of `{source}` names {file!r}, which is no file beside it.")
        found = _fetch(source, file, hub)
        if found is None:
            raise DraftCheckpointError(f"`{name}` of `{source}` names `{file}`, and there is no such file.")
        yield file, found


def _plain_tensors(source: str, name: str, path: str) -> dict[str, torch.Tensor]:
    """Tensors of one file."""
    try:
        if name.endswith(".safetensors"):
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise DraftCheckpointError(f"`{name}` of `{source}` cannot be read as plain tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(t, torch.Tensor) for k, t in tensors.items()
    ):
        raise DraftCheckpointError(f"`{name}` of `{source}` is not a plain dictionary of tensors.")
    return tensors


def _fetch(source: str, name: str, hub: dict[str, Any]) -> str | None:
    """Local path of a file, downloaded if need be; None if the repository does not have it."""
    return cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
