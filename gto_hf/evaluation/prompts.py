# SPDX-License-Identifier: Apache-2.0
"""Question sets: the package's own, the field's by name, any local JSON Lines file, or a dataset on the Hub. Level 5."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from .public_sets import PUBLIC_SETS, hub_rows, named_rows, public_rows


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


@dataclass(frozen=True)
class QuestionSet:
    """
    Questions and where they came from.

    Attributes:
        name (`str`): As asked for.
        questions (`tuple[Question, ...]`): In order.
        source (`str`): File, or Hub id with config, split and the commit that was read.
    """

    name: str
    questions: tuple[Question, ...]
    source: str

    def __str__(self) -> str:
        count = len(self.questions)
        return f"{self.name}: {count} questions, hash {prompts_hash(list(self.questions))}, from {self.source}"


def load_set(name: str | PathLike, *, limit: int | None = None, **hub: Any) -> QuestionSet:
    """
    One question set, and where it came from.

    Args:
        name (`str`): One of
            - `"chat"`, `"code"` or `"math"` (30 each, written for this project), or `"own"` (all three);
            - `"mt-bench"`, `"humaneval"`, `"gsm8k"`, `"spec-bench"` or `"speed-bench"`: read from the Hub;
            - `NAME=FILE`: the same, from a local JSON Lines file (any other `NAME` is a label);
            - a JSON Lines file, or a dataset id on the Hub. Rows hold `turns` (list of strings), `messages` (chat
              format) or `prompt` (a string, or a list of turns).
        limit (`int`, *optional*): First rows only.
        **hub: Passed to `datasets.load_dataset` (`split`, `revision`, ..); `split` defaults to `"train"` for an id.

    Raises:
        ValueError: If there is no such set; names set and row of a question that cannot be read.
    """
    named, path = split_name(str(name))
    label = named or path
    if label in ("own", *OWN_SETS) and not named:
        text = (files("gto_hf") / "assets" / "questions.jsonl").read_text(encoding="utf-8")
        rows = [row for row in map(json.loads, text.splitlines()) if label in ("own", row["set"])]
        source = "this package"
    elif named or Path(path).is_file() or (Path(path).exists() and label not in PUBLIC_SETS):
        rows, source, label = _local(label, path, named)
    elif label in PUBLIC_SETS:
        rows, source = public_rows(label, **hub)
    elif "/" not in label or label.endswith((".json", ".jsonl")):
        raise ValueError(
            f"There is no file `{name}`, and no set of that name: own sets are own, {', '.join(OWN_SETS)}; the field's are "
            f"{', '.join(PUBLIC_SETS)}. A dataset on the Hub is named `owner/name`."
        )
    else:
        rows, source = hub_rows(label, **{"split": "train", **hub})
    questions = tuple(_question(row, i, label) for i, row in enumerate(rows))
    if not questions:
        raise ValueError(f"The question set `{name}` is empty.")
    return QuestionSet(label, questions[:limit], source)


def set_names(text: str) -> list[str]:
    """
    `"own,code"` to its names.

    Raises:
        ValueError: If there is none, or one stands twice.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ValueError("`--sets` names no question set.")
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"`--sets {text}` names `{twice}` twice.")
    return found


def load_sets(text: str) -> list[QuestionSet]:
    """
    The sets of a comma-separated option, in order, every question once: one that an earlier set has as well is left out of the
    later one, whose `source` then says so.

    Raises:
        ValueError: As [`set_names`] and [`load_set`], or if nothing is left of a set.
    """
    sets, seen = [], set()
    for name in set_names(text):
        found = load_set(name)
        kept = tuple(q for q in found.questions if (q.history, q.turns) not in seen)
        left_out = len(found.questions) - len(kept)
        if not kept:
            raise ValueError(f"`--sets {text}`: every question of `{name}` stands in an earlier set. Leave it out.")
        seen.update((q.history, q.turns) for q in kept)
        said = f", without {left_out} that an earlier set has" if left_out else ""
        sets.append(replace(found, questions=kept, source=found.source + said))
    return sets


def split_name(text: str) -> tuple[str, str]:
    """
    `"NAME=PATH"` to `(NAME, PATH)`, a path alone to `("", path)`.

    Paths may hold an equals sign too (`runs/lr=1e-4`): what exists on disk decides, else the last one parts the two.
    """
    if "=" not in text or Path(text).exists():
        return "", text
    pairs = [(text[:at], text[at + 1 :]) for at, sign in enumerate(text) if sign == "="]
    return next(((name, path) for name, path in pairs if path and Path(path).exists()), pairs[-1])


def load_questions(name: str | PathLike, *, limit: int | None = None, **hub: Any) -> list[Question]:
    """Questions of one set; see [`load_set`]."""
    return list(load_set(name, limit=limit, **hub).questions)


def _local(label: str, path: str, named: str) -> tuple[list[dict[str, Any]], str, str]:
    """Rows of a file, what to say of it, and the name of its questions' set."""
    from gto_hf.data import load_jsonl

    if not Path(path).is_file():
        raise ValueError(f"There is no file `{path}` (given as `{label}={path}`).")
    label = label if named else Path(path).stem
    rows = load_jsonl(path)
    return (named_rows(label, rows) if label in PUBLIC_SETS else rows), path, label


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
    said = row.get("prompt")
    if isinstance(said, str) or (isinstance(said, list) and said and all(isinstance(turn, str) for turn in said)):
        return Question(key, name, (said,) if isinstance(said, str) else tuple(said))
    raise ValueError(f"Row {number} of `{label}` has none of `turns`, `messages` and `prompt`; it has {sorted(row)}.")


def spread(questions: list[T], count: int) -> list[T]:
    """`count` questions (or other rows) at equal distances, so that every set keeps its share; a fixed choice."""
    if count < 1 or not questions:
        raise ValueError(f"Cannot choose {count} of {len(questions)} questions; ask for at least one.")
    step = len(questions) / count
    return [questions[int(i * step)] for i in range(count)] if count < len(questions) else questions


def spread_each(questions: list[Question], count: int) -> list[Question]:
    """`count` questions of every set (all of a smaller one), chosen as [`spread`] does; sets stay in order."""
    sets: dict[str, list[Question]] = {}
    for question in questions:
        sets.setdefault(question.set, []).append(question)
    return [question for some in sets.values() for question in spread(some, count)]


def with_system(questions: list[Question], text: str) -> list[Question]:
    """The questions with a system message before each that has none."""
    return [
        q if any(role == "system" for role, _ in q.history) else replace(q, history=(("system", text), *q.history))
        for q in questions
    ]


def prompts_hash(questions: list[Question]) -> str:
    """First 12 hex digits of a hash over all texts: two figures with different hashes are not comparable."""
    text = json.dumps([[q.history, q.turns] for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
