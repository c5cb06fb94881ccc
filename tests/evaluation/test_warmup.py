# SPDX-License-Identifier: Apache-2.0
"""Measuring the costs of an automatic tree is no part of anybody's seconds, whatever the lengths of the prompts."""

from dataclasses import replace

import pytest

from gto_hf import TreeConfig
from gto_hf.decoding import context_range, costs
from gto_hf.evaluation import PLAIN, Question, bench, measure, session
from gto_hf.evaluation.bench import System, bench_decode
from gto_hf.evaluation.warmup import WarmUp
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer


@pytest.fixture
def pair():
    target = tiny_target()
    return target, tiny_draft(target, tree=replace(TreeConfig(2, 2, 4), auto=True))


@pytest.fixture
def calls(monkeypatch):
    """What happened in order: `warm` and `timed` answers by the drafts' systems, and `measured` costs."""
    found = []
    for module, name in ((session, "measure_answer"), (bench, "run_system")):
        real = getattr(module, name)

        def spy(*args, real=real, **kwargs):
            system = next(each for each in args if isinstance(each, System))
            if system.name == "auto":
                found.append("warm" if "stopping_criteria" in system.kwargs else "timed")
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    real = costs.measure_costs
    monkeypatch.setattr(costs, "measure_costs", lambda *args: found.append("measured") or real(*args))
    return found


def test_the_evaluation_warms_up_in_every_context_range(pair, calls):
    target, draft = pair
    # 1, 300 and 2 tokens; the second turn of the last question is in the other range again.
    questions = [Question("0", "s", ("A",)), Question("1", "s", ("B" * 300,)), Question("2", "s", ("CD", "E" * 300))]
    systems = [System(PLAIN), System("auto", {"assistant_model": draft})]
    measure(target, tiny_tokenizer(), questions, systems, max_new_tokens=3)
    assert calls == ["warm", "measured", "timed", "warm", "measured", *["timed"] * 3]


def test_the_benchmark_warms_up_in_every_context_range(pair, calls):
    target, draft = pair
    systems = [System(PLAIN), System("auto", {"assistant_model": draft}, draft.tree)]
    bench_decode(target, draft, systems, [[5] * 4, [6] * 300, [7] * 5], new_tokens=3, memory=False)
    assert calls == ["warm", "measured", "timed", "warm", "measured", "timed", "timed"]


def test_a_fixed_tree_is_warmed_once_and_with_few_tokens(pair):
    target, draft = pair
    seen = []
    warm = WarmUp(lambda system, prompt: seen.append((system.name, len(prompt), system.kwargs["stopping_criteria"])))
    systems = [
        System(PLAIN),
        System("d", {"assistant_model": draft}, TreeConfig(2, 2, 4)),
        System("auto", {}, draft.tree),
    ]
    for length in (5, 300, 6):
        warm(systems, [9] * length)
    assert [each[:2] for each in seen] == [(PLAIN, 5), ("d", 5), ("auto", 5), ("auto", 300)]
    made = bench.answer(target, [9] * 5, max_new_tokens=50, stopping_criteria=seen[0][2], eos_token_id=None)
    assert len(made.tokens) == 8


def test_ranges_are_powers_of_two_from_256_on():
    assert [context_range(n) for n in (1, 256, 257, 512, 513)] == [8, 8, 9, 9, 10]
