# SPDX-License-Identifier: Apache-2.0
"""
A JSON Lines file of answers that survives being killed at any moment (level 4).

Beside `out.jsonl` stands `out.meta`, a JSON object with the settings the answers were written with. (Its name holds no
`.json`, so that `datasets` does not take it for data when it reads the folder.)
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any


try:
    import fcntl
except ImportError:  # Windows: two runs on one file are not told apart there
    fcntl = None

Key = tuple[str, int]


class AnswerFile:
    """
    The open output file of one run.

    Rows of a conversation are appended together and the last one says so (`"last": true`), so whatever follows the last
    such row was cut off by an interruption and is removed.

    Args:
        path (`str` or `PathLike`): JSON Lines file; made with its folder if it does not exist.
        settings (`dict`): What the answers depend on, JSON values. A run continues a file only if they are the same;
            `answers` may have grown.
        facts (`dict`, *optional*): Kept beside them for the reader, not compared.

    Attributes:
        done (`list[tuple[str, int]]`): `(id, answer)` of the conversations in the file, in file order.

    Raises:
        ValueError: If the file was written with other settings (names them), was not written by this command, is damaged,
            or another run is writing it.
    """

    def __init__(self, path: str | PathLike, settings: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            self._lock()
            self._check(json.loads(json.dumps(settings)), facts or {})
            self.done, self._ends = self._read()
            self.keep(len(self.done))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add the complete rows of one conversation or several, and hand them to the system."""
        texts = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)  # dates and such in further columns
        self._file.write(b"".join(text.encode(errors="replace") + b"\n" for text in texts))
        self._file.flush()

    def keep(self, conversations: int) -> None:
        """Remove everything behind the first `conversations`."""
        del self.done[conversations:], self._ends[conversations:]
        self._file.truncate(self._ends[-1] if self._ends else 0)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it even after a kill
        except BlockingIOError:
            raise ValueError(f"Another run is writing `{self.path}`. Wait for it, or give another output.") from None
        except OSError:
            pass  # a file system without locks

    def _check(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        meta = self.path.with_suffix(".meta")
        if os.path.getsize(self.path) > 0:
            if not meta.is_file():
                raise ValueError(
                    f"`{self.path}` exists, and `{meta.name}`, which would say how it was written, does not. Give another "
                    "output, or move the file away."
                )
            compare_settings(json.loads(meta.read_text(encoding="utf-8"))["settings"], settings, self.path)
        new = meta.with_name(meta.name + ".new")
        new.write_text(json.dumps({"settings": settings, **facts}, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(new, meta)

    def _read(self) -> tuple[list[Key], list[int]]:
        """Keys of the complete conversations and where each ends, in bytes."""
        done, ends, place = [], [], 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            place += len(line)
            if not line.endswith(b"\n"):
                break  # half a row
            row = None
            with suppress(ValueError):
                row = json.loads(line)
            if not isinstance(row, dict) or not {"id", "answer", "last"} <= set(row):
                raise ValueError(f"`{self.path}`, line {number}, is no row of this command. Give another output.")
            if row["last"]:
                done.append((row["id"], row["answer"]))
                ends.append(place)
        return done, ends


def compare_settings(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """
    Refuse to mix answers of different settings in one file.

    Raises:
        ValueError: Names every setting that differs, with both values.
    """
    grown = isinstance(now.get("answers"), int) and now["answers"] > before.get("answers", now["answers"])
    other = [
        f"`{name}` was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not (name == "answers" and grown)
    ]
    if other:
        raise ValueError(
            f"`{path}` was written with other settings: {'; '.join(other)}. Use those, or give another output."
        )
