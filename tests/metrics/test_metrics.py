# SPDX-License-Identifier: Apache-2.0
"""The metrics as others load them: by path, with hand examples, and against the package's own counts."""

import ast
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import evaluate
import pytest
import yaml

import gto_hf
from gto_hf.decoding import DecodingStatistics
from gto_hf.evaluation import Counts, SystemRun
from gto_hf.evaluation.bench import Answer, SystemResult, paired_ratio


FOLDER = Path(gto_hf.__file__).parent / "metrics"
NAMES = ("acceptance_length", "acceptance_by_depth", "speedup_ratio")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    return lambda name: evaluate.load(str(FOLDER / name), cache_dir=str(tmp_path))


def test_acceptance_length_by_hand(load):
    metric = load("acceptance_length")
    # 2 + 1, 0 + 1 and 3 + 0 tokens; then 1 + 1; then an answer that ended within the prefill
    found = metric.compute(histograms=[[1, 0, 1, 1], [0, 1], []], bonus_tokens=[2, 1, 0])
    assert found == {
        "tau_micro": 9 / 4, "tau_macro": (7 / 3 + 2) / 2, "tau_without_bonus": 6 / 4, "rounds": 4, "answers": 3
    }  # fmt: skip
    assert math.isnan(metric.compute(histograms=[[]], bonus_tokens=[0])["tau_micro"])
    with pytest.raises(ValueError, match="Answer 1 has the histogram .*at most one bonus token"):
        metric.compute(histograms=[[1], [1]], bonus_tokens=[1, 2])


def test_acceptance_by_depth_by_hand(load):
    metric = load("acceptance_by_depth")
    found = metric.compute(histograms=[[1, 0, 1], [0, 0, 1, 1, 0]])
    assert found["unconditional"] == [0.75, 0.75, 0.25] and found["conditional"] == [0.75, 1.0, pytest.approx(1 / 3)]
    assert found["tau_without_bonus"] == 1.75
    nothing = metric.compute(histograms=[[]])
    assert nothing["unconditional"] == nothing["conditional"] == [] and math.isnan(nothing["tau_without_bonus"])
    with pytest.raises(ValueError, match="Answer 0 .* negative"):
        metric.compute(histograms=[[2, -1]])


def test_speedup_ratio_by_hand(load):
    metric = load("speedup_ratio")
    found = metric.compute(tokens=[10, 10], seconds=[1.0, 2.0], baseline_tokens=[10, 10], baseline_seconds=[2.0, 8.0])
    assert found["speedup"] == pytest.approx(10 / 3) and found["speedup_paired"] == pytest.approx(math.sqrt(8))
    with pytest.raises(ValueError, match="Prompt 0 has 0 tokens"):
        metric.compute(tokens=[0], seconds=[1.0], baseline_tokens=[1], baseline_seconds=[1.0])


def test_nothing_measured_is_nan_and_no_error(load):
    length = load("acceptance_length").compute(histograms=[], bonus_tokens=[])
    depth = load("acceptance_by_depth").compute(histograms=[])
    ratio = load("speedup_ratio").compute(tokens=[], seconds=[], baseline_tokens=[], baseline_seconds=[])
    assert all(math.isnan(length[name]) for name in ("tau_micro", "tau_macro", "tau_without_bonus"))
    assert depth["unconditional"] == depth["conditional"] == [] and math.isnan(depth["tau_without_bonus"])
    assert all(math.isnan(ratio[name]) for name in ("speedup", "speedup_paired", "low", "high"))
    assert (length["rounds"], length["answers"], ratio["prompts"]) == (0, 0, 0)


def test_they_are_the_figures_of_the_package(load):
    a, b = DecodingStatistics(), DecodingStatistics()
    for counts, rounds in ((a, [(2, True), (0, True), (3, False)]), (b, [(1, True), (4, True)])):
        counts.start(1)
        for accepted, bonus in rounds:
            counts.add_rounds([(accepted, bonus)], 10)
    run = SystemRun("draft", 0.0, [Answer([1] * 8, 1.0, a), Answer([1] * 6, 0.5, b)])
    histograms, bonus = [a.accepted_histogram, b.accepted_histogram], [a.bonus_tokens, b.bonus_tokens]
    length = load("acceptance_length").compute(histograms=histograms, bonus_tokens=bonus)
    assert (length["tau_micro"], length["tau_macro"]) == pytest.approx((run.tau_micro, run.tau_macro))
    depth = load("acceptance_by_depth").compute(histograms=histograms)
    assert depth["unconditional"] == pytest.approx((a + b).acceptance_by_depth())
    assert depth["conditional"] == pytest.approx((a + b).acceptance_by_depth(conditional=True))
    assert depth["tau_without_bonus"] == pytest.approx(Counts(statistics=a + b).tau_without_bonus)
    fast = SystemResult("draft", 0.0, run.answers)
    plain = SystemResult("plain", 0.0, [Answer([1] * 8, 2.0), Answer([1] * 6, 0.9)])
    ratio = load("speedup_ratio").compute(
        tokens=[8, 6], seconds=[1.0, 0.5], baseline_tokens=[8, 6], baseline_seconds=[2.0, 0.9]
    )
    assert ratio["speedup"] == pytest.approx(fast.speedup(plain))
    mine = paired_ratio(fast, plain)
    assert (ratio["speedup_paired"], ratio["low"], ratio["high"]) == pytest.approx((mine.mean, mine.low, mine.high))


def test_batches_can_be_added_one_by_one(load):
    metric = load("acceptance_length")
    metric.add(histograms=[1, 1], bonus_tokens=2)
    metric.add_batch(histograms=[[0, 1], []], bonus_tokens=[0, 0])
    assert metric.compute()["tau_micro"] == pytest.approx((1 + 2 + 1) / 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_stands_alone_and_has_a_card(name, load):
    source = (FOLDER / name / f"{name}.py").read_text()
    modules = {
        module.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert modules <= {"datasets", "evaluate", "math", "statistics"}
    metric = load(name)
    assert "Args:" in metric.inputs_description and metric.citation.strip().startswith("@")
    _, head, body = (FOLDER / name / "README.md").read_text().split("---\n", 2)
    assert {"evaluate", "metric"} <= set(yaml.safe_load(head)["tags"])
    for title in ("How to use", "Inputs", "Output values", "Limitations", "Citation"):
        assert f"## {title}" in body
    for feature in metric.features:
        assert f"`{feature}`" in body


class Error(Exception):
    """Of the stand-in for gradio."""


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_a_whole_space(name, load, tmp_path, monkeypatch):
    """Copied elsewhere, it has every file that its card names, and its page computes; gradio is a stand-in that records."""
    space = shutil.copytree(FOLDER / name, tmp_path / "app")
    _, head, body = (space / "README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(head)
    assert (card["sdk"], card["sdk_version"].split(".")[0], card["app_file"]) == ("gradio", "6", "app.py")
    assert f"hf upload me/{name} path/to/gto_hf/metrics/{name} . --repo-type space" in body
    needed = {line.split(">")[0] for line in (space / "requirements.txt").read_text().split()}
    source = (space / "app.py").read_text()
    roots = {m.split(".")[0] for m in re.findall(r"^(?:import|from) (\S+)", source, re.MULTILINE)}
    assert roots - set(sys.stdlib_module_names) == needed | {"gradio"}  # which comes with the sdk
    pages = []
    stand_in = SimpleNamespace(
        Error=Error, Code=lambda value, **_: value, JSON=dict, Interface=lambda *args, **kwargs: pages.append(args)
    )
    monkeypatch.setitem(sys.modules, "gradio", stand_in)
    runpy.run_path(str(space / "app.py"))
    (compute, example, _), *_ = pages
    assert compute(example) == load(name).compute(**json.loads(example))
    for wrong in ("{", "[]", '{"x": 1}'):
        with pytest.raises(Error):
            compute(wrong)
    with pytest.raises(Error, match="Give a JSON object with"):
        compute("{}")
    assert compute(example)  # an error leaves nothing behind


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_the_docstrings_hold(name, load):
    lines = [line.strip() for line in load(name).inputs_description.splitlines()]
    start = next(number for number, line in enumerate(lines) if ".compute(" in line and line.startswith(">>>"))
    call = lines[start][4:]
    variable = call.split(".", 1)[0]
    assert eval(call, {variable: load(name)}) == ast.literal_eval(lines[start + 1])
