# SPDX-License-Identifier: Apache-2.0
"""Reading JSON Lines and turning prompts with target-written answers into token rows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from gto_hf.drafts import count_tokens

from .encode import RowEncoder
from .reasons import RowError
from .report import DataReport


def load_jsonl(path: str | PathLike) -> list[dict[str, Any]]:
    """
    Rows of a JSON Lines file.

    Raises:
        ValueError: Names file and line of the first row that is not a JSON object.
    """
    rows = []
    # Not `splitlines`: it also cuts at U+2028 and its like, which JSON allows within strings.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}, must hold a JSON object, found {type(row).__name__}.")
        rows.append(row)
    return rows


def render_prompt(tokenizer: Any, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
    """
    Token ids of a conversation up to where the model answers; plain text for tokenizers without chat template.

    `kwargs` (`tools`, and variables such as `enable_thinking`) go to the template.

    Warns:
        If there is no chat template: a model that was trained with one answers otherwise than it would.
    """
    if tokenizer.chat_template is None:
        warnings.warn(
            "The tokenizer has no chat template: prompts are plain text, without roles. If the model was trained with a template, "
            "save it as `chat_template.jinja` beside the tokenizer."
        )
        text = "\n".join(message["content"] for message in messages)
        return tokenizer(text)["input_ids"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion_ids(tokenizer: Any, answer: dict[str, Any]) -> list[int]:
    """The very ids the target generated: stored where its text does not re-tokenise to them, else from the text."""
    ids = answer.get("ids")
    if ids is None:
        ids = tokenizer(answer["text"], add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if answer["finished"] else list(ids)


def training_rows(
    tokenizer: Any, prompts: Iterable[dict[str, Any]], answers: Iterable[dict[str, Any]], max_length: int | None = None
) -> list[dict[str, list[int]]]:
    """
    Rows with `input_ids` and `labels` (-100 outside the answer), as [`GTOTrainer`] takes them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`Iterable[dict]`): `{"id", "prompt"}`, or any row that [`regenerate`] takes, with an `id`.
        answers (`Iterable[dict]`): As [`regenerate`] writes them, or `{"id", "answer", "finished", "text"}` (with `"ids"`
            where the text does not re-tokenise) for prompts of one turn; several per prompt are several rows.
        max_length (`int`, *optional*): Longer rows are cut.

    Raises:
        ValueError: If an answer belongs to none of the prompts.
    """
    asked = {str(row["id"]): row for row in prompts}
    rows = []
    for answer in answers:
        if str(answer["id"]) not in asked:
            raise ValueError(f"The answer with `id={answer['id']!r}` belongs to none of the {len(asked)} prompts.")
        if "input_ids" in answer:
            row = {key: answer[key] for key in ("input_ids", "labels")}
        else:
            prompt = render_prompt(tokenizer, [{"role": "user", "content": asked[str(answer["id"])]["prompt"]}])
            completion = completion_ids(tokenizer, answer)
            row = {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}
        rows.append({key: ids[:max_length] for key, ids in row.items()})
    return rows


def dataset_token_counts(
    dataset: Iterable[dict[str, Any]], tokenizer: Any, vocab_size: int, *, text_field: str = "text"
) -> torch.Tensor:
    """
    Token frequencies of a training set in any of the trainer's formats, `(vocab_size,)` int64.

    All tokens of a row count, prompts too. Malformed rows are skipped, with one warning.

    Args:
        dataset (`Iterable[dict]`): Rows in any format that [`RowEncoder`] reads.
        text_field (`str`, *optional*, defaults to `"text"`): Column of plain text.

    Raises:
        ValueError: If no row can be read; names the reasons, and what the first such rows hold.
    """
    encoder = RowEncoder(tokenizer, vocab_size, text_field=text_field, assistant_only=False)
    report = DataReport("dataset")

    def ids() -> Iterator[list[int]]:
        for row in dataset:
            try:
                found = encoder.tokens(row)
            except RowError as error:
                report.details.setdefault(error.reason.value, error.detail)
                report.count(0, [error.reason.value])
            else:
                report.count(len(found), [])
                yield found

    counts = count_tokens(ids(), vocab_size)
    report.check()
    for message in report.warnings():
        warnings.warn(message)
    return counts
