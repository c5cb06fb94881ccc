# SPDX-License-Identifier: Apache-2.0
"""A folder that appears whole or not at all. Level 4."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_free(folder: Path, *, overwrite: bool, source: str | None = None) -> None:
    """
    Refuse a folder that holds something, before any work.

    Args:
        folder (`Path`): Where to write. overwrite (`bool`): Whether its content may be replaced.
        source (`str`, *optional*): Folder that is read from; it is never replaced.

    Raises:
        ValueError: Says what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{folder}` is a file; name a folder.")
    if source and os.path.isdir(source) and Path(source).resolve() == folder.resolve():
        raise ValueError(f"`{folder}` is the draft itself; write to another folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"`{folder}` is not empty. Choose another folder, or pass `overwrite=True` (`--overwrite`).")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """
    A temporary folder beside `folder` that takes its place when the block ends well; otherwise nothing has changed.
    """
    folder = Path(os.path.abspath(folder))
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
            os.replace(folder, old)  # onto an empty folder
        os.replace(temporary, folder)
        if old is not None:
            shutil.rmtree(old)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
