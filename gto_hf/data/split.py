# SPDX-License-Identifier: Apache-2.0
"""Rows to train on and rows to measure on that share no question."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any


Rows = list[dict[str, Any]]


def hold_out(rows: Iterable[dict[str, Any]], share: float = 0.05, seed: int = 0) -> tuple[Rows, Rows]:
    """
    Split rows by what was asked: all answers to one question are on the same side.

    A split by rows would put one answer to a question among the training rows and another among those held out, and the
    draft would be measured on questions that it has seen.

    Args:
        rows (`Iterable[dict]`): In any format that [`RowEncoder`] reads.
        share (`float`, *optional*, defaults to `0.05`): Of the questions that are held out; at least one is.
        seed (`int`, *optional*, defaults to `0`): Chooses them.

    Returns:
        `tuple[list[dict], list[dict]]`: Rows to train on and rows held out, both in the order they came in.

    Raises:
        ValueError: If all rows ask the same.
    """
    rows = list(rows)
    keys = [_asked(row) for row in rows]
    questions = list(dict.fromkeys(keys))
    if len(questions) < 2:
        raise ValueError(f"{len(rows)} rows ask {len(questions)} question: to hold one out, give at least two.")
    count = min(max(1, round(share * len(questions))), len(questions) - 1)
    held = set(random.Random(seed).sample(questions, count))
    return tuple([row for row, key in zip(rows, keys, strict=True) if (key in held) is side] for side in (False, True))


def _asked(row: dict[str, Any]) -> str:
    """What a row holds before its first answer; all of it where that cannot be told."""
    asked: Any = row
    if row.get("input_ids") is not None and row.get("labels") is not None:
        answered = (at for at, label in enumerate(row["labels"]) if label != -100)
        asked = list(row["input_ids"])[: next(answered, None)]
    elif row.get("messages") or row.get("conversations"):
        messages = row.get("messages") or row["conversations"]
        speakers = [message.get("role", message.get("from")) for message in messages]
        answered = (at for at, speaker in enumerate(speakers) if speaker in ("assistant", "gpt"))
        asked = messages[: next(answered, None)]
    elif row.get("prompt") is not None:
        asked = row["prompt"]
    return json.dumps(asked, sort_keys=True, default=str)
