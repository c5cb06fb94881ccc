# SPDX-License-Identifier: Apache-2.0
"""Tensors of training rows on disk, found by the row's tokens. Level 4."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


_SHARD_BYTES = 2**28


def row_key(tokens: torch.Tensor) -> str:
    """Name of a row: a hash of its token ids `(n,)`, padding left out."""
    return hashlib.blake2b(tokens.cpu().to(torch.int64).numpy().tobytes(), digest_size=16).hexdigest()


class RowStore:
    """
    A folder of safetensors shards with the tensors of rows. Processes may share a folder; each writes shards of its own.

    A row is on disk once [`flush`] returns; a killed process loses what it had not flushed, and nothing else.

    Args:
        folder (`str` or `Path`): Made if it does not exist.
        facts (`dict`): What the tensors depend on (models, layers, tree ..), as JSON.

    Raises:
        ValueError: If the folder was written under other facts; names the first that differs.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check(json.loads(json.dumps(facts)))
        self._where: dict[str, tuple[Any, set[str]]] = {}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self._waiting_bytes = 0
        self._opened: set[str] = set()
        self._look()

    def _check(self, facts: dict[str, Any]) -> None:
        path = self.folder / "facts.json"
        if not path.exists():
            part = path.with_suffix(f".{uuid.uuid4().hex}.part")
            part.write_text(json.dumps(facts, indent=1), encoding="utf-8")
            os.replace(part, path)
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        for name in {**found, **facts}:
            if found.get(name) != facts.get(name):
                raise ValueError(
                    f"`{self.folder}` holds rows made with {name} = {found.get(name)!r}, but now it is {facts.get(name)!r}. "
                    "Name another folder, or delete this one."
                )

    def _look(self) -> None:
        """Find shards that are new, those of other processes too."""
        for shard in sorted(self.folder.glob("*.safetensors")):
            if shard.name not in self._opened:
                self._opened.add(shard.name)
                handle = safe_open(shard, framework="pt")
                rows: dict[str, set[str]] = {}
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    key, field = name.split("/")
                    rows.setdefault(key, set()).add(field)
                for key, fields in rows.items():  # a row that two processes wrote is read from one of them
                    self._where.setdefault(key, (handle, fields))

    def __len__(self) -> int:
        return len(self._where.keys() | self._waiting.keys())

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._where

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """Tensors of a row, on the CPU; None if it is not there."""
        if key in self._waiting:
            return self._waiting[key]
        if key not in self._where:
            return None
        handle, fields = self._where[key]
        return {field: handle.get_tensor(f"{key}/{field}") for field in fields}

    def put(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keep a row's tensors; written to disk in large shards."""
        if key in self:
            return
        self._waiting[key] = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        self._waiting_bytes += sum(tensor.nbytes for tensor in self._waiting[key].values())
        if self._waiting_bytes > _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting, and find what other processes wrote."""
        if self._waiting:
            self._write()
        self._look()

    def _write(self) -> None:
        shard = self.folder / f"{uuid.uuid4().hex}.safetensors"
        part = shard.with_suffix(".part")
        save_file({f"{k}/{field}": t for k, row in self._waiting.items() for field, t in row.items()}, part)
        os.replace(part, shard)
        self._waiting, self._waiting_bytes = {}, 0
