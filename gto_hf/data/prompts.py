# SPDX-License-Identifier: Apache-2.0
"""Prompts to be answered (level 4): rows of files and datasets in the usual formats, read into [`Conversation`]s."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from .conversations import ROLES


OWN = "own"
# What an output row or the trainer gives a meaning of its own; such columns of a prompt row are not carried over.
RESERVED = {
    "id", "question_id", "prompt", "turns", "messages", "conversations", "system", "completion", "text", "ids", "answer",
    "turn", "last", "finished", "input_ids", "labels", "attention_mask", "position_ids", "assistant_masks",
    "completion_mask", "seq_lengths", "images", "chat_template_kwargs",
}  # fmt: skip

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """
    What is said before each answer that is to be written.

    Attributes:
        id (`str`): Unique among the conversations that are answered together.
        asks (`tuple[tuple[dict, ...], ...]`): Messages before the first answer, then those between answers. Each ends
            with a user message.
        extra (`dict`): Further columns of the row, carried over to the output.
    """

    id: str
    asks: tuple[tuple[Message, ...], ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Functions the target may call, from a column `tools` (a list, or its JSON)."""
        tools = self.extra.get("tools")
        return (json.loads(tools) if isinstance(tools, str) else tools) or None


class Skipped:
    """Rows that were left out: how many for which reason, and the first places of each."""

    SHOWN = 3
    REASONS = 8

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one row."""
        self.reasons[reason] += 1
        places = self._places.setdefault(reason, [])
        if len(places) < self.SHOWN:
            places.append(place)

    def __str__(self) -> str:
        """One line for each of the commonest reasons; empty if nothing was skipped."""
        lines = [
            f"skipped {count}: {reason} ({', '.join(self._places[reason])}{', ..' if count > self.SHOWN else ''})"
            for reason, count in self.reasons.most_common(self.REASONS)
        ]
        rest = self.reasons.total() - sum(count for _, count in self.reasons.most_common(self.REASONS))
        return "\n".join([*lines, *([f"skipped {rest} for other reasons"] if rest else [])])


def read_prompts(
    name: str | PathLike,
    *,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    rewrite: bool = True,
) -> tuple[list[Conversation], Skipped]:
    """
    Conversations of a file, of a dataset folder or Hub dataset, or of the package (`"own"`: its training prompts).

    Args:
        name (`str`): A JSON Lines file, another file or folder that `datasets` reads, or a dataset id.
        split (`str`, *optional*, defaults to `"train"`): Of a dataset.
        subset (`str`, *optional*): Configuration of a dataset.
        limit (`int`, *optional*): Conversations to take, in file order.
        rewrite (`bool`, *optional*, defaults to `True`): See [`conversation`].

    Returns:
        The conversations and the rows that were skipped.

    Raises:
        ValueError: If there is nothing of that name, or no row can be read.
    """
    path = files("gto_hf") / "assets" / "train_prompts.jsonl" if name == OWN else Path(name)
    if str(path).endswith(".jsonl") and path.is_file():
        rows: Iterable[tuple[str, Any]] = _lines(path)
    elif str(name).endswith(".jsonl"):
        raise ValueError(f"There is no file `{name}`.")
    else:
        rows = ((f"row {number}", row) for number, row in enumerate(_dataset(str(name), split, subset)))
    found, skipped = conversations(rows, limit=limit, rewrite=rewrite)
    if not found:
        raise ValueError(f"`{name}` holds no prompt that can be read.\n{str(skipped) or 'It is empty.'}")
    return found, skipped


def conversations(
    rows: Iterable[tuple[str, Any]], *, limit: int | None = None, rewrite: bool = True
) -> tuple[list[Conversation], Skipped]:
    """Conversations of `(place, row)` pairs, at most `limit`, and what was skipped; see [`conversation`]."""
    skipped, seen, found = Skipped(), Counter(), []
    for place, row in rows:
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(conversation(row, seen, rewrite=rewrite))
        except ValueError as error:
            skipped.add(str(error), place)
    return found, skipped


def _lines(path: Any) -> Iterator[tuple[str, Any]]:
    """`("line n", row)` of a JSON Lines file; a line that is no JSON is a `ValueError` in place of its row."""
    with path.open("rb") as file:  # text mode would also end lines at characters that JSON allows within strings
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except ValueError:  # not UTF-8 is one, too
                yield f"line {number}", None


def _dataset(name: str, split: str, subset: str | None) -> Iterable[dict[str, Any]]:
    """Rows of anything else that `datasets` reads."""
    from datasets import load_dataset

    path = Path(name)
    if path.is_file():
        kind = {"json": "json", "parquet": "parquet", "csv": "csv", "arrow": "arrow"}.get(path.suffix[1:])
        if kind is None:
            raise ValueError(f"`{name}` must end in .jsonl, .json, .parquet, .csv or .arrow.")
        return load_dataset(kind, data_files=name, split="train")
    try:
        return load_dataset(name, subset, split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"`{name}` is neither a file here, nor the package's `{OWN}`, nor a dataset that can be reached: {error}"
        ) from error


def conversation(row: Any, seen: Counter[str], *, rewrite: bool = True) -> Conversation:
    """
    One row in any of the formats.

    Args:
        row (`dict`): With `messages`, `conversations` (ShareGPT), `turns` (list of strings) or `prompt` (string or
            messages); optionally `id`, `system` and `tools`.
        seen (`Counter[str]`): Ids so far; updated. A repeated id gets a running number.
        rewrite (`bool`, *optional*, defaults to `True`): Let the target answer every turn, so that it reads nothing but
            users and itself. False keeps given answers as context and asks for the last one alone.

    Raises:
        ValueError: The reason why the row cannot be answered.
    """
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    given, system = _given(row), row.get("system")
    said = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    said.extend(map(_message, given))
    while said and said[-1]["role"] != "user":
        said.pop()
    if not said:
        raise ValueError("no user message")
    if rewrite and any(message["role"] == "tool" for message in said):
        raise ValueError("results of tools, which belong to the given answers (use --no-rewrite)")
    if next(message["role"] for message in said if message["role"] not in ("system", "developer")) != "user":
        raise ValueError("the first message is not the user's")
    turns = all(isinstance(each, str) for each in given)
    asks: list[list[Message]] = [[]]
    for message in said:
        dropped = rewrite and message["role"] == "assistant"
        if (turns or dropped) and asks[-1] and asks[-1][-1]["role"] == "user":
            asks.append([])
        if not dropped:
            asks[-1].append(message)
    key = row.get("id", row.get("question_id"))
    if key is None or isinstance(key, (dict, list)):
        key = hashlib.sha256(json.dumps(asks, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()[
            :16
        ]
    key = _unique(str(key), seen)
    extra = {name: value for name, value in row.items() if name not in RESERVED and value is not None}
    found = Conversation(key, tuple(map(tuple, asks)), extra)
    try:
        _ = found.tools
    except json.JSONDecodeError:
        raise ValueError("`tools` is not JSON") from None
    return found


def _unique(key: str, seen: Counter[str]) -> str:
    """The id itself, or with a running number that no id has yet."""
    name = key
    while seen[name]:
        seen[key] += 1
        name = f"{key}-{seen[key]}"
    seen[name] += 1
    return name


def _given(row: dict[str, Any]) -> list[Any]:
    """What the row holds: messages, or what the user says in each turn."""
    names = [name for name in ("messages", "conversations", "turns", "prompt") if row.get(name) is not None]
    if not names:
        raise ValueError(f"none of `messages`, `conversations`, `turns` and `prompt`, but {sorted(row)}")
    name = next((name for name in names if row[name]), names[0])
    given = row[name]
    if not given or not isinstance(given, (str, list)):
        raise ValueError(f"`{name}` is empty or no text and no list")
    return [given] if isinstance(given, str) else given


def _message(given: Any) -> Message:
    """A string (the user's), a chat message, or a ShareGPT message as a chat message."""
    if isinstance(given, str):
        given = {"role": "user", "content": given}
    if not isinstance(given, dict):
        raise ValueError("a message that is neither a text nor an object")
    speaker, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    role = ROLES.get(str(speaker), speaker)
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"the role {role!r}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (role == "assistant" and given.get("tool_calls")):
        raise ValueError("a message whose content is not text")
    if role == "user" and not content.strip():
        raise ValueError("an empty user message")
    further = {k: v for k, v in given.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": role, "content": content, **further}
