# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all. Level 4."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_free(folder: Path, *, overwrite: bool, sources: Iterable[Any] = ()) -> None:
    """
    Refuse a folder that holds something, before any work.

    Args:
        folder (`Path`): Where to write. overwrite (`bool`): Whether its content may be replaced.
        sources (`Iterable`): Names of what is read: draft and target. A folder among them is never replaced, nor is one that
            holds it.

    Raises:
        ValueError: Says what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{folder}` is a file; name a folder.")
    place = folder.resolve()
    for source in sources:
        if source and os.path.isdir(source) and Path(source).resolve().is_relative_to(place):
            raise ValueError(f"`{folder}` is or holds `{source}`, which is read from; write to another folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"`{folder}` is not empty. Choose another folder, or pass `overwrite=True` (`--overwrite`).")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """
    A temporary folder beside `folder` that takes its place when the block ends well; otherwise nothing has changed.

    Of a link, what it points to is replaced.
    """
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        old = None
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            try:
                os.replace(folder, old)  # onto an empty folder
            except OSError:  # a mount point, for example, cannot be moved
                old.rmdir()
                raise
        os.replace(temporary, folder)
        if old is not None:
            shutil.rmtree(old)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
