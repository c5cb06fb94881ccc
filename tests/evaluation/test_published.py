# SPDX-License-Identifier: Apache-2.0
"""
What is published, cell by cell: tables, JSON and plots of answers made by hand, and what every timed call is asked for.

All tokens and seconds differ, so that no figure can stand in for another.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gto_hf import TreeConfig
from gto_hf.decoding import DecodingStatistics
from gto_hf.evaluation import (
    PLAIN,
    Counts,
    Detail,
    Measured,
    Question,
    SystemRun,
    facts,
    measure,
    plots,
    session,
    summarize,
)
from gto_hf.evaluation.bench import System
from gto_hf.evaluation.plots import write_plots
from gto_hf.evaluation.report import report_text
from gto_hf.evaluation.runs import WHOLE_DISTRIBUTION, answer
from tests.tiny import EOS, tiny_draft, tiny_target, tiny_tokenizer


LOOPING, STRAIGHT = [1, 2, 1, 2, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]
TREE = "d @ 2/2/4"
OWN = {"d": {"depth": 4, "top_k": 5, "total_tokens": 20, "auto": False}}


def made(name, tokens, seconds, first, rounds=(), **sums):
    """One answer: seconds in all and to its first token, `(accepted, bonus)` of its rounds, and further sums."""
    statistics = DecodingStatistics()
    if rounds:
        statistics.start(1)
        for each in rounds:
            statistics.add_rounds([each], 10)
        assert statistics.emitted_tokens == len(tokens)
        sums |= {"tau_sum": statistics.tau, "tau_answers": 1}
    counts = Counts(
        statistics=statistics,
        answers=1,
        tokens=len(tokens),
        seconds=seconds,
        first_seconds=first,
        first_tokens=1,
        **sums,
    )
    return Measured(tokens, seconds, statistics if rounds else None, name, counts)


@pytest.fixture(scope="module")
def results():
    long, short = list(range(20, 30)), list(range(40, 45))
    one, two = [(1, True)] * 3 + [(0, True)], [(1, True), (2, True)]
    runs = [
        SystemRun(PLAIN, 0.0, [made("chat", LOOPING, 4.0, 0.5), made("math", STRAIGHT, 2.0, 0.25)]),
        SystemRun("d", 0.0, [
            made("chat", LOOPING, 1.0, 0.3, [(2, True), (0, True), (2, True)], target_seconds=0.5, draft_seconds=0.1,
                 processor_seconds=0.03, round_seconds=0.7, traced_rounds=3, expected_accepted=4.5, observed_accepted=4,
                 greedy_pruned=2, greedy_path=1, greedy_histogram=[1, 1, 1]),
            made("math", [5] * 6, 0.8, 0.2, [(1, True), (3, False)], target_seconds=0.3, draft_seconds=0.1,
                 processor_seconds=0.02, round_seconds=0.5, traced_rounds=2, expected_accepted=2.0, observed_accepted=4,
                 greedy_pruned=1, greedy_path=0, greedy_histogram=[0, 2]),
        ]),
        SystemRun(TREE, 0.0, [made("chat", LOOPING, 2.0, 0.6, one), made("math", STRAIGHT, 1.0, 0.35, two)]),
        SystemRun(PLAIN, 1.0, [made("chat", long, 5.0, 0.4), made("math", short, 1.0, 0.1)]),
        SystemRun("d", 1.0, [
            made("chat", long, 2.0, 0.6, [(4, True), (3, True)]), made("math", short, 0.5, 0.2, [(3, True)])
        ]),
        SystemRun(TREE, 1.0, [
            made("chat", long, 3.0, 0.7, [(2, True)] * 3), made("math", short[::-1], 1.0, 0.3, [(1, True)] * 2)
        ]),
    ]  # fmt: skip
    return summarize(runs)


def tables(text):
    """Rows of cells of every table, by its heading."""
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {
        title: [
            [cell.strip() for cell in line[1:-1].split(" | ")] for line in body.splitlines() if line.startswith("| ")
        ]
        for title, _, body in parts
    }


def test_every_cell_of_the_report(results):
    text = report_text(results, {"machine": "two cores", TREE: {"a": 1}}, ["chat: 1 question", "math: 1 question"])
    found = tables(text)
    # By hand: 14 tokens in 6 s against 14 in 1.8 s; after the prefill 12 in 5.25 s against 12 in 1.3 s; and so on.
    assert found["Results"] == [
        ["T", "system", "tokens/s", "SR", "SR after prefill", "τ (macro)", "τ (micro)", "without bonus", "rounds",
         "to first token", "repeated 4-grams", "same text"],
        ["0", PLAIN, "2.3", "1.00", "1.00", "-", "-", "-", "-", "375 ms", "12 %", "-"],
        ["0", "d", "7.8", "3.33", "4.04", "2.42", "2.40", "1.60", "5", "250 ms", "38 %", "1 of 2"],
        ["0", TREE, "4.7", "2.00", "2.56", "2.12", "2.00", "1.00", "6", "475 ms", "12 %", "2 of 2"],
        ["1", PLAIN, "2.5", "1.00", "1.00", "-", "-", "-", "-", "250 ms", "0 %", "-"],
        ["1", "d", "6.0", "2.40", "3.24", "4.25", "4.33", "3.33", "3", "400 ms", "0 %", "2 of 2"],
        ["1", TREE, "3.8", "1.50", "1.83", "2.50", "2.60", "1.60", "5", "500 ms", "0 %", "1 of 2"],
    ]  # fmt: skip
    head, *rows = found["By question set"]
    assert head == ["T", "system", "set", "answers", "tokens/s", "SR", "SR after prefill", "τ (macro)", "τ (micro)"]
    assert len(rows) == 12 and rows[:4] == [
        ["0", PLAIN, "chat", "1", "2.0", "1.00", "1.00", "-", "-"],
        ["0", PLAIN, "math", "1", "3.0", "1.00", "1.00", "-", "-"],
        ["0", "d", "chat", "1", "8.0", "4.00", "5.00", "2.33", "2.33"],
        ["0", "d", "math", "1", "7.5", "2.50", "2.92", "2.50", "2.50"],
    ]
    assert rows[8:10] == [
        ["1", "d", "chat", "1", "5.0", "2.50", "3.29", "4.50", "4.50"],
        ["1", "d", "math", "1", "10.0", "2.00", "3.00", "4.00", "4.00"],
    ]
    assert found["Acceptance by depth"] == [
        ["T", "system", "1", "2", "3", "4"],
        ["0", "d", "0.80, 0.80", "0.60, 0.75", "0.20, 0.33", "-"],
        ["0", TREE, "0.83, 0.83", "0.17, 0.20", "-", "-"],
        ["1", "d", "1.00, 1.00", "1.00, 1.00", "1.00, 1.00", "0.33, 0.33"],
        ["1", TREE, "1.00, 1.00", "0.60, 0.60", "-", "-"],
    ]
    assert found["Tree and greedy path"] == [
        ["T", "system", "greedy path pruned", "accepted path is greedy", "accepted, greedy path", "accepted, tree",
         "expected at T = 1", "τ of a chain (simulated)"],
        ["0", "d", "60 %", "20 %", "1.00", "1.60", "1.30", "2.00"],
    ]  # fmt: skip
    assert found["Time of a round"] == [
        ["T", "system", "ms per round", "target", "draft", "processor", "host"],
        ["0", "d", "240.0", "67 %", "17 %", "4 %", "12 %"],
    ]
    assert (
        "- chat: 1 question\n- math: 1 question\n" in text and f'- machine: two cores\n- {TREE}: {{"a": 1}}\n' in text
    )


def test_every_key_of_the_json(results):
    found = next(r for r in results if (r.system, r.temperature, r.set) == ("d", 0.0, "all")).to_dict()
    counts, figures = found.pop("counts"), found.pop("figures")
    assert found == {"system": "d", "temperature": 0.0, "set": "all", "identical_to_plain": 1}
    assert figures.pop("acceptance_by_depth") == pytest.approx([0.8, 0.6, 0.2])
    assert figures.pop("acceptance_by_depth_conditional") == pytest.approx([0.8, 0.75, 1 / 3])
    assert figures == pytest.approx(
        {
            "speedup": 10 / 3, "speedup_after_prefill": (12 / 1.3) / (12 / 5.25), "tau_macro": (7 / 3 + 5 / 2) / 2,
            "tau_micro": 12 / 5, "tau_without_bonus": 8 / 5, "tau_chain_simulated": 2.0, "expected_accepted": 1.3,
            "observed_accepted": 1.6, "tokens_per_second": 14 / 1.8, "tokens_per_second_after_prefill": 12 / 1.3,
            "first_seconds": 0.25, "greedy_path_pruned": 0.6, "accepted_is_greedy": 0.2, "greedy_accepted": 1.0,
            "target_share": 2 / 3, "draft_share": 1 / 6, "processor_share": 1 / 24, "host_share": 1 / 8,
            "repeated_4_grams": 3 / 8,
        }
    )  # fmt: skip
    statistics = counts.pop("statistics")
    assert statistics["accepted_histogram"] == [1, 1, 2, 1] and statistics["bonus_tokens"] == 4
    assert counts.pop("greedy_histogram") == [1, 3, 1]
    assert counts == pytest.approx(
        {
            "answers": 2, "tokens": 14, "seconds": 1.8, "first_seconds": 0.5, "first_tokens": 2, "tau_sum": 29 / 6,
            "tau_answers": 2, "target_seconds": 0.8, "draft_seconds": 0.2, "processor_seconds": 0.05,
            "round_seconds": 1.2, "traced_rounds": 5, "expected_accepted": 6.5, "observed_accepted": 8,
            "greedy_pruned": 3, "greedy_path": 1,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def figures(results, tmp_path_factory):
    """The figures that are written, by file name."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    kept = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.Figure, "savefig", lambda self, path, **kwargs: kept.update({path.name: self}))
        patch.setattr(plots, "FEWEST", 1)  # of the few rounds here every depth is drawn
        write_plots(tmp_path_factory.mktemp("plots"), results, OWN)
    return kept


def test_the_bars_of_tau(figures):
    axes = figures["tau_by_set.png"].axes
    heights = [[[bar.get_height() for bar in bars] for bars in axis.containers] for axis in axes]
    assert heights == [[pytest.approx([29 / 12, 7 / 3, 5 / 2])], [pytest.approx([4.25, 4.5, 4.0])]]
    assert [axis.get_title(loc="left") for axis in axes] == ["T = 0", "T = 1"]
    labels = [[text.get_text() for text in axis.texts] for axis in axes]
    assert labels == [["2.42", "2.33", "2.50"], ["4.25", "4.50", "4.00"]]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["all", "chat", "math"]


def test_the_lines_of_acceptance(figures):
    for axis, whole, step in zip(
        figures["acceptance_by_depth.png"].axes,
        ([0.8, 0.6, 0.2], [1, 1, 1, 1 / 3]),
        ([0.8, 0.75, 1 / 3], [1, 1, 1, 1 / 3]),
        strict=True,
    ):
        full, dotted = axis.lines
        assert (full.get_linestyle(), dotted.get_linestyle()) == ("-", ":")
        assert list(full.get_ydata()) == pytest.approx(whole) and list(dotted.get_ydata()) == pytest.approx(step)
        assert list(full.get_xdata()) == list(dotted.get_xdata()) == list(range(1, len(whole) + 1))


def test_the_split_of_time(figures):
    (axis,) = figures["time_split.png"].axes
    bars = [container[0] for container in axis.containers]  # of target, draft, choosing tokens, host
    assert [bar.get_width() for bar in bars] == pytest.approx([160, 40, 10, 30])
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 160, 200, 210])
    assert [c.get_label() for c in axis.containers] == ["target", "draft", "choosing tokens", "host"]


def test_the_points_of_speed_by_tree(figures):
    cold, hot = figures["speedup_by_tree.png"].axes
    for axis, speeds in ((cold, [2.0, 10 / 3]), (hot, [1.5, 2.4])):
        line = axis.lines[0]
        assert list(line.get_xdata()) == [4, 20] and list(line.get_ydata()) == pytest.approx(speeds)
        labels = [tick.get_text() for tick in axis.get_xticklabels()]
        assert dict(zip(axis.get_xticks(), labels, strict=True)) == {4: "2/2/4", 20: "4/5/20"}


def test_the_order_and_the_seeds_of_the_calls(monkeypatch):
    asked = []

    def answered(target, prompt, system, *, temperature=0.0, max_new_tokens, seed=0, detail=None):
        if "stopping_criteria" not in system.kwargs:  # no warm-up
            asked.append((temperature, system.name, seed, len(prompt), max_new_tokens))
        return made("", [7, 8], 1.0, 0.5)

    monkeypatch.setattr(session, "measure_answer", answered)
    questions = [Question("0", "s", ("A", "BC")), Question("1", "s", ("D" * 9,)), Question("2", "s", ("E" * 6,))]
    systems = [System(name) for name in (PLAIN, "a", "b")]
    options = {"temperatures": (0.0, 0.7), "max_new_tokens": 11, "seed": 100}
    runs = measure(None, tiny_tokenizer(), questions, systems, **options)
    order = [[PLAIN, "a", "b"], ["a", "b", PLAIN], ["b", PLAIN, "a"], [PLAIN, "a", "b"]]
    lengths = [1, 1 + 2 + 2, 9, 6]  # before the second turn stand the first and plain's answer of two characters
    assert asked == [
        (temperature, name, 100 + number, lengths[number], 11)
        for temperature in (0.0, 0.7)
        for number, names in enumerate(order)
        for name in names
    ]
    assert [(run.name, run.temperature, len(run.answers)) for run in runs] == [
        (name, temperature, 4) for temperature in (0.0, 0.7) for name in (PLAIN, "a", "b")
    ]


def test_what_generate_is_asked_for():
    asked = {}

    def generate(ids, **kwargs):
        asked.update(kwargs, seed=torch.initial_seed())
        return SimpleNamespace(sequences=torch.cat([ids, torch.tensor([[3, 4]])], 1))

    target = SimpleNamespace(device=torch.device("cpu"), generate=generate)
    made = answer(target, [5, 6], draft="draft", temperature=0.7, max_new_tokens=9, seed=41, streamer="clock")
    assert made.tokens == [3, 4] and made.seconds > 0
    wanted = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 9, "seed": 41}
    wanted |= {"assistant_model": "draft", "streamer": "clock"}
    assert {name: asked[name] for name in wanted} == wanted
    assert {name: asked[name] for name in WHOLE_DISTRIBUTION} == WHOLE_DISTRIBUTION
    asked.clear()
    answer(target, [5, 6], seed=42)
    assert asked["do_sample"] is False and asked["seed"] == 42 and not {"temperature", "top_k"} & set(asked)


def test_an_answer_is_measured_as_it_is_asked_for(monkeypatch):
    target = tiny_target()
    draft = tiny_draft(target, tree=TreeConfig(2, 2, 4))
    asked, ends = [], []
    real, add = session.answer, Counts.add_traces
    monkeypatch.setattr(session, "answer", lambda *args, **kwargs: asked.append(kwargs) or real(*args, **kwargs))
    monkeypatch.setattr(Counts, "add_traces", lambda self, rounds, eos: ends.append(eos) or add(self, rounds, eos))
    system = System("d", {"assistant_model": draft}, TreeConfig(3, 3, 8))
    options = {"temperature": 0.6, "max_new_tokens": 7, "seed": 5}
    found = session.measure_answer(target, [9, 8, 7], system, detail=Detail(trees=True), **options)
    assert len(asked) == 2 and all(each.items() >= options.items() for each in asked)  # timed, then recorded
    assert "streamer" in asked[0] and "streamer" not in asked[1]
    assert ends == [[EOS]]  # nothing is expected behind an end
    assert 0 < found.counts.first_seconds <= found.counts.seconds == found.seconds
    assert found.counts.tokens == len(found.tokens) and draft.tree == TreeConfig(2, 2, 4)


def test_the_machine_is_named(monkeypatch):
    info = Path("/proc/cpuinfo")
    said = facts.machine()
    assert said.strip()
    if info.exists() and "model name" in info.read_text() and not torch.cuda.is_available():
        name, _, cores = said.rpartition(", ")
        assert f": {name}\n" in info.read_text() and cores == f"{info.read_text().count('model name')} cores"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Large One")
    assert facts.machine() == "A Large One"
