# SPDX-License-Identifier: Apache-2.0
"""What must not leave this machine with a push: absolute paths, which mean nothing elsewhere, and tokens. Level 5."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any


_SECRETS = {"token", "hub_token", "use_auth_token", "api_key"}
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")
_LARGE = 2**20  # bytes; from here on a file is linked rather than copied


def publishable(value: Any) -> Any:
    """
    A copy of plain values without tokens, and with the last part of every absolute path in place of the path.

    Dictionaries, lists, tuples and strings are looked into; other objects stay what they are.
    """
    if isinstance(value, dict):
        return {key: None if key in _SECRETS else publishable(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(publishable(inner) for inner in value)
    if isinstance(value, PurePath):
        return type(value)(publishable(str(value)))
    if type(value) is not str:
        return value
    if _TOKEN.search(value):
        return None
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if is_path(value) else value


def is_path(name: str) -> bool:
    """Whether a name is a place on some machine, and so no Hub id."""
    return os.path.isabs(name) or name.startswith("~") or bool(re.match(r"[A-Za-z]:\\", name))


def clean_folder(folder: Path) -> None:
    """
    Make the files that trainers write into a folder publishable, in place.

    An adapter whose base draft is a folder then names no base, and the card that PEFT wrote for it, which shows that folder,
    is removed.
    """
    config = folder / "adapter_config.json"
    if config.exists():
        base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
        card = folder / "README.md"
        if base and (is_path(base) or base.startswith(".") or os.path.isdir(base)):
            _rewrite(config, lambda values: values | {"base_model_name_or_path": None})
            if card.exists() and base in card.read_text(encoding="utf-8"):
                card.unlink()
    for name, change in (
        ("trainer_state.json", publishable),
        ("config.json", _names),
        ("tokenizer_config.json", _names),
    ):
        if (folder / name).exists():
            _rewrite(folder / name, change)


def copy_for_push(source: Path, into: Path, *, ignore: tuple[str, ...] = ()) -> None:
    """
    A publishable copy of a folder. It stays what it is while the source is written to or deleted; large files are linked
    where the file system can do that.

    Args:
        source (`Path`): Folder. into (`Path`): New folder. ignore (`tuple[str, ...]`): Patterns of names to leave out.
    """
    shutil.copytree(source, into, ignore=shutil.ignore_patterns(*ignore), copy_function=_link_or_copy)
    clean_folder(into)


def _names(value: Any) -> Any:
    """Publishable names of models inside a config; everything else, such as texts of special tokens, stays."""
    if isinstance(value, dict):
        return {
            key: publishable(inner) if key in ("name_or_path", "_name_or_path") else _names(inner)
            for key, inner in value.items()
        }
    return value


def _link_or_copy(source: str, into: str) -> None:
    if os.path.getsize(source) >= _LARGE:
        try:
            os.link(source, into)
            return
        except OSError:
            pass
    shutil.copy2(source, into)


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file if that makes a difference; never through a link to another one."""
    values = json.loads(path.read_text(encoding="utf-8"))
    changed = change(values)
    if changed != values:
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, path)
