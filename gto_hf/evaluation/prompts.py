# SPDX-License-Identifier: Apache-2.0
"""Question sets: the package's own, any local JSON Lines file, or a dataset on the Hub. Level 5."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar


T = TypeVar("T")
OWN_SETS = ("chat", "code", "math")


@dataclass(frozen=True)
class Question:
    """
    One conversation to be answered turn by turn.

    Attributes:
        id (`str`): Unique within its set.
        set (`str`): Name of the question set.
        turns (`tuple[str, ...]`): What the user says, in order.
        history (`tuple[tuple[str, str], ...]`): `(role, content)` of messages before the first turn.
    """

    id: str
    set: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()

    def messages(self, turn: int, answers: list[str]) -> list[dict[str, str]]:
        """The conversation up to user turn `turn`, with the answers so far."""
        said = list(self.history)
        for i, text in enumerate(self.turns[: turn + 1]):
            said.append(("user", text))
            if i < turn:
                said.append(("assistant", answers[i]))
        return [{"role": role, "content": content} for role, content in said]


def load_questions(name: str | PathLike, *, limit: int | None = None, **hub: Any) -> list[Question]:
    """
    Questions of one set.

    Args:
        name (`str`): `"chat"`, `"code"` or `"math"` (30 each, written for this project), `"own"` (all three), a JSON
            Lines file, or a dataset id on the Hub. Rows hold `turns` (list of strings), `messages` (chat format) or
            `prompt` (string).
        limit (`int`, *optional*): First rows only.
        **hub: Passed to `datasets.load_dataset` (`split`, `revision`, ..); `split` defaults to `"train"`.

    Raises:
        ValueError: Names set and row of a question without any of the three fields.
    """
    if name == "own" or name in OWN_SETS:
        text = (files("gto_hf") / "assets" / "questions.jsonl").read_text(encoding="utf-8")
        rows = [row for row in map(json.loads, text.splitlines()) if name in ("own", row["set"])]
        label = str(name)
    elif Path(name).exists():
        from gto_hf.data import load_jsonl

        rows, label = load_jsonl(name), Path(name).stem
    elif "/" not in str(name) or str(name).endswith((".json", ".jsonl")):
        raise ValueError(
            f"There is no file `{name}`, and no set of that name: own sets are own, {', '.join(OWN_SETS)}. A dataset on the "
            "Hub is named `owner/name`."
        )
    else:
        from datasets import load_dataset

        rows, label = load_dataset(str(name), **{"split": "train", **hub}), str(name)
    questions = [_question(row, i, label) for i, row in enumerate(rows)]
    if not questions:
        raise ValueError(f"The question set `{name}` is empty.")
    return questions[:limit]


def _question(row: dict[str, Any], number: int, label: str) -> Question:
    """One row in any of the three formats."""
    name, key = str(row.get("set", label)), str(row.get("id", row.get("question_id", number)))
    if row.get("turns"):
        if not all(isinstance(turn, str) for turn in row["turns"]):
            raise ValueError(f"Row {number} of `{label}`: `turns` must be a list of strings.")
        return Question(key, name, tuple(row["turns"]))
    if row.get("messages"):
        if not all({"role", "content"} <= set(message) for message in row["messages"]):
            raise ValueError(f"Row {number} of `{label}`: every message needs `role` and `content`.")
        said = [(message["role"], message["content"]) for message in row["messages"]]
        while said and said[-1][0] == "assistant":
            said.pop()  # the answer is what is to be written
        if not said or said[-1][0] != "user":
            raise ValueError(f"Row {number} of `{label}`: `messages` must hold a user message.")
        return Question(key, name, (said[-1][1],), tuple(said[:-1]))
    if isinstance(row.get("prompt"), str):
        return Question(key, name, (row["prompt"],))
    raise ValueError(f"Row {number} of `{label}` has none of `turns`, `messages` and `prompt`; it has {sorted(row)}.")


def spread(questions: list[T], count: int) -> list[T]:
    """`count` questions (or other rows) at equal distances, so that every set keeps its share; a fixed choice."""
    if count < 1 or not questions:
        raise ValueError(f"Cannot choose {count} of {len(questions)} questions; ask for at least one.")
    step = len(questions) / count
    return [questions[int(i * step)] for i in range(count)] if count < len(questions) else questions


def prompts_hash(questions: list[Question]) -> str:
    """First 12 hex digits of a hash over all texts: two figures with different hashes are not comparable."""
    text = json.dumps([[q.history, q.turns] for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
