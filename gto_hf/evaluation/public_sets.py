# SPDX-License-Identifier: Apache-2.0
"""
The field's question sets: where they lie on the Hub and how their rows become questions. Level 5.

None of them is part of this package: the questions belong to their authors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


Row = dict[str, Any]
# Rows of SPEED-Bench whose text its licence keeps out of the published files.
PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class PublicSet:
    """
    One published set.

    Attributes:
        repo (`str`): Dataset id. options (`dict`): For `datasets.load_dataset`.
        rows (`Callable`): One published row to one with `turns`, `id` and, where the set has parts, `set`.
        files (`dict[str, str]`): Part to its file, where the parts are files.
    """

    repo: str
    rows: Callable[[Row], Row]
    options: dict[str, Any] = field(default_factory=lambda: {"split": "train"})
    files: dict[str, str] = field(default_factory=dict)


def _turns(row: Row) -> list[str]:
    said = row.get("turns", row.get("prompt"))
    return [said] if isinstance(said, str) else list(said or [])


def _mt_bench(row: Row) -> Row:
    return {"id": row.get("question_id", row.get("prompt_id")), "turns": _turns(row)}


def _humaneval(row: Row) -> Row:
    if "turns" in row:
        return {"id": row.get("question_id"), "turns": _turns(row)}
    # The published prompt is bare code; the sentence is what the field asks chat models.
    return {"id": row["task_id"], "turns": ["Complete the code I provided.\n\n" + row["prompt"]]}


def _gsm8k(row: Row) -> Row:
    return {"id": row.get("question_id"), "turns": _turns(row) or [row["question"]]}


def _spec_bench(row: Row) -> Row:
    part = row.get("category")
    part = part if part in SPEC_BENCH_TASKS else "mt_bench"  # its categories are those of MT-Bench
    return {"id": row.get("question_id", row.get("id")), "set": f"spec-bench/{part}", "turns": _turns(row)}


def _speed_bench(row: Row) -> Row:
    turns = _turns(row)
    if any(PLACEHOLDER in turn for turn in turns):
        raise ValueError(
            f"Row {row.get('question_id')} of speed-bench holds a placeholder instead of its text, which its licence keeps "
            "out of the published files. Build the set with `prepare_data.py` of NVIDIA Model-Optimizer's "
            "examples/specdec_bench, save it as JSON Lines, and give `speed-bench=FILE`."
        )
    return {"id": row.get("question_id"), "set": f"speed-bench/{row.get('category', 'all')}", "turns": turns}


PUBLIC_SETS = {
    "mt-bench": PublicSet("HuggingFaceH4/mt_bench_prompts", _mt_bench),
    "humaneval": PublicSet("openai/openai_humaneval", _humaneval, {"split": "test"}),
    "gsm8k": PublicSet("openai/gsm8k", _gsm8k, {"name": "main", "split": "test"}),
    "spec-bench": PublicSet(
        "RedHatAI/speculator_benchmarks",
        _spec_bench,
        files={"mt_bench": "question.jsonl", **{task: f"{task}.jsonl" for task in SPEC_BENCH_TASKS}},
    ),
    "speed-bench": PublicSet("nvidia/SPEED-Bench", _speed_bench, {"name": "qualitative", "split": "test"}),
}


def named_rows(name: str, rows: list[Row]) -> list[Row]:
    """
    Rows of a published set as question rows, wherever they were read from.

    Raises:
        ValueError: Names the row that is not one of this set.
    """
    found = []
    for number, row in enumerate(rows):
        try:
            made = PUBLIC_SETS[name].rows(row)
        except KeyError as error:
            raise ValueError(f"Row {number} of `{name}` has no {error}; it has {sorted(row)}.") from error
        found.append(made if made["id"] is not None else {**made, "id": number})
    return found


def public_rows(name: str, **hub: Any) -> tuple[list[Row], str]:
    """Rows of a published set from the Hub (or the local cache of it), and where they came from."""
    public = PUBLIC_SETS[name]
    if not public.files:
        rows, source = hub_rows(public.repo, **{**public.options, **hub})
        return named_rows(name, rows), source
    rows, sources = [], []
    for part, file in public.files.items():
        some, source = hub_rows(public.repo, **{**public.options, "data_files": file, **hub})
        rows += [{**row, "category": part} for row in some]
        sources.append(source)
    return named_rows(name, rows), "; ".join(dict.fromkeys(sources))


def hub_rows(repo: str, **options: Any) -> tuple[list[Row], str]:
    """
    Rows of a dataset on the Hub, and `"owner/name (options) at commit"`.

    Raises:
        ValueError: If it cannot be read: says what to do without the Hub.
    """
    from datasets import load_dataset

    try:
        dataset = load_dataset(repo, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The question set `{repo}` could not be read from the Hub: {type(error).__name__}: {error} Without the Hub, "
            "download the set elsewhere and give its JSON Lines file (`--sets NAME=FILE`), or use the package's own "
            "questions (`--sets own`)."
        ) from error
    said = ", ".join(f"{key} {value}" for key, value in options.items() if key != "revision")
    revision = resolved_revision(dataset)
    return list(dataset), f"{repo} ({said}) at " + (revision or "a revision that `datasets` did not tell")


def resolved_revision(dataset: Any) -> str | None:
    """The commit that `datasets` read a Hub dataset at, from the addresses of its files; None if they hold none."""
    for address in getattr(dataset.info, "download_checksums", None) or {}:
        found = re.search(r"@([0-9a-f]{40})(/|$)", address)
        if found:
            return found[1]
    return None
