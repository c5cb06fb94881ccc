# SPDX-License-Identifier: Apache-2.0
"""The field's question sets load as they are published; they are not part of this project."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from gto_hf.evaluation import load_questions, load_set
from gto_hf.evaluation.public_sets import PLACEHOLDER, PUBLIC_SETS


FOLDER = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the public question sets do not lie beside this checkout")
@pytest.mark.parametrize("name, turns", [("mt_bench", 2), ("humaneval", 1), ("gsm8k", 1)])
def test_a_public_set_has_its_80_questions(name, turns):
    questions = load_questions(FOLDER / f"{name}.jsonl")
    assert len(questions) == 80 and len({q.id for q in questions}) == 80
    assert {len(q.turns) for q in questions} == {turns}
    shipped = {turn for q in load_questions("own") for turn in q.turns}
    assert not shipped & {turn for q in questions for turn in q.turns}


COMMIT = "0123456789abcdef0123456789abcdef01234567"
# One row of each set as it is published.
PUBLISHED = {
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["a", "b"], "category": "writing", "prompt_id": 7, "reference": []},
    "openai/openai_humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "test": "", "entry_point": "f"},
    "openai/gsm8k": {"question": "1 + 1?", "answer": "2"},
    "RedHatAI/speculator_benchmarks": {"prompt": "q"},
    "nvidia/SPEED-Bench": {"question_id": "x", "category": "coding", "turns": ["q"]},
}


class Published(list):
    """A dataset as `datasets` returns it."""

    info = SimpleNamespace(download_checksums={f"hf://datasets/owner/name@{COMMIT}/data/a.parquet": {}})


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def load_dataset(repo, **options):
        asked.append((repo, options))
        return Published([PUBLISHED[repo]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    "name, turns, sets",
    [
        ("mt-bench", ("a", "b"), ["mt-bench"]),
        ("humaneval", ("Complete the code I provided.\n\ndef f():",), ["humaneval"]),
        ("gsm8k", ("1 + 1?",), ["gsm8k"]),
        ("spec-bench", ("q",), [f"spec-bench/{t}" for t in "mt_bench translation summarization qa math_reasoning rag".split()]),
        ("speed-bench", ("q",), ["speed-bench/coding"]),
    ],
)  # fmt: skip
def test_named_sets_come_from_the_hub_with_their_commit(hub, name, turns, sets):
    found = load_set(name)
    assert [q.set for q in found.questions] == sets and {q.turns for q in found.questions} == {turns}
    assert {repo for repo, _ in hub} == {PUBLIC_SETS[name].repo}
    assert f"at {COMMIT}" in str(found) and f"{name}: {len(sets)} questions, hash " in str(found)


def test_options_of_a_set_reach_the_hub(hub):
    load_set("gsm8k", revision="v1")
    assert hub == [("openai/gsm8k", {"name": "main", "split": "test", "revision": "v1"})]


def test_a_revision_that_is_not_told_is_not_invented(hub, monkeypatch):
    monkeypatch.setattr(Published, "info", SimpleNamespace(download_checksums=None))
    assert "a revision that `datasets` did not tell" in load_set("gsm8k").source


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    def load_dataset(repo, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="openai/gsm8k.*no route.*--sets NAME=FILE.*--sets own"):
        load_set("gsm8k")


def test_named_files_become_the_named_set(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [
        {"question_id": 1, "category": "coding", "turns": ["a"]},
        {"question_id": 2, "category": "rag", "turns": ["b"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [q.set for q in load_questions(f"spec-bench={path}")] == ["spec-bench/mt_bench", "spec-bench/rag"]
    assert {q.set for q in load_questions(f"mine={path}")} == {"mine"}
    path.write_text(
        json.dumps({"question_id": 3, "turns": [f"FULL BENCHMARK DATA {PLACEHOLDER} USING SPECDEC_BENCH"]})
    )
    with pytest.raises(ValueError, match="Row 3 of speed-bench holds a placeholder.*prepare_data.py"):
        load_questions(f"speed-bench={path}")
    path.write_text(json.dumps({"text": "x"}))
    with pytest.raises(ValueError, match="Row 0 of `gsm8k` has no 'question'"):
        load_questions(f"gsm8k={path}")
