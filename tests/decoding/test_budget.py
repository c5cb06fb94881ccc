# SPDX-License-Identifier: Apache-2.0
"""Automatic trees: the choice by hand, on injected costs; switching off; calibration; the text stays the text."""

import math

import pytest
import torch

from gto_hf import CostCurve, TreeConfig
from gto_hf.tree import Budget, DraftTree
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft


LIMITS = TreeConfig(depth=4, top_k=2, total_tokens=8, auto=True)


TOKENS = [torch.tensor([[2, 3]])]


def logs(*rows):
    return torch.tensor([rows]).log()


def budget(slope, *, draft=0.0, level=0.0, limits=LIMITS):
    """Target seconds 1 + slope per node."""
    return Budget(CostCurve((0, 8), (1.0, 1.0 + 8 * slope), draft, level), limits)


# ---------------------------------------------------------------- cost curve
def test_costs_between_and_beyond_the_measured_numbers():
    curve = CostCurve((0, 4, 8), (1.0, 1.2, 2.0), 0.5, 0.25)
    assert curve.target_seconds(0) == 1.0 and curve.target_seconds(2) == pytest.approx(1.1)
    assert curve.target_seconds(6) == pytest.approx(1.6) and curve.target_seconds(12) == pytest.approx(2.8)
    assert curve.draft_seconds(0) == 0 and curve.draft_seconds(1) == 0.5 and curve.draft_seconds(3) == 1.0


@pytest.mark.parametrize(
    "nodes, target, draft",
    [
        ((0,), (1.0,), 0),
        ((1, 2), (1.0, 1.0), 0),
        ((0, 2, 1), (1, 1, 1), 0),
        ((0, 1), (1.0, -1.0), 0),
        ((0, 1), (1, 1), -1),
    ],
)
def test_curves_that_are_none_are_refused(nodes, target, draft):
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(nodes, target, draft, 0.0)


# ---------------------------------------------------------------- choices by hand
def test_nodes_are_kept_while_their_probability_pays_for_their_time():
    levels = [logs(0.6, 0.3), logs(0.36, 0.12, 0.06, 0.03)]
    # The rate is one token per second, so a node pays if its path probability exceeds the slope.
    for slope, kept in ((0.01, 6), (0.05, 5), (0.1, 4), (0.2, 3), (0.35, 2), (0.5, 1), (0.7, 0)):
        assert budget(slope).nodes(levels, TOKENS) == kept, slope


def test_another_level_is_drafted_while_it_is_expected_to_pay():
    # One level of mass 0.9; the next is expected to have (0.6 + 0.3) * 0.9 = 0.81 more accepted tokens at no node cost.
    for level, deeper in ((0.5, True), (0.8, True), (0.82, False), (2.0, False)):
        assert budget(0.0, level=level).deeper([logs(0.6, 0.3)]) is deeper, level
    # With dear nodes (0.3 each) only 0.54 - 0.3 is left of it.
    for level, deeper in ((0.2, True), (0.25, False)):
        assert budget(0.3, level=level).deeper([logs(0.6, 0.3)]) is deeper, level


def test_a_faster_rate_makes_nodes_dearer():
    b = budget(0.1, limits=LIMITS)
    tree = DraftTree(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]]), logs(1.0, 0.9))
    b.start_round()
    b.deeper([logs(0.9, 0.1)])
    for _ in range(200):
        b.observe(tree, [[0, 1]], [2])  # two tokens in 1.1 seconds, round after round
    assert b.rate == pytest.approx(2 / 1.1, rel=0.01)
    assert b.nodes([logs(0.19, 0.15)], TOKENS) == 1  # times 1 / 0.9, a node must now bring 0.1 * 1.82


def test_calibration_follows_what_was_accepted():
    b = budget(0.2)
    tree = DraftTree(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]]), logs(1.0, 0.8))
    assert b.nodes([logs(0.8, 0.1)], TOKENS) == 1
    for _ in range(60):
        b.start_round()
        b.deeper([logs(0.8, 0.1)])
        b.observe(tree, [[0]], [9])  # never accepted
    assert b.nodes([logs(0.8, 0.1)], TOKENS) == 0


def test_drafting_pauses_longer_and_longer_while_it_does_not_pay_and_comes_back():
    b = budget(0.0, draft=0.5)
    tree = DraftTree(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]]), logs(1.0, 0.8))
    bare = DraftTree.root_only(torch.tensor([1]))
    drafted = []
    for _ in range(300):
        on = b.start_round()
        drafted.append(on)
        if on:
            b.nodes([logs(0.8, 0.1)], TOKENS)
        b.observe(tree if on else bare, [[0]], [9])
    assert sum(drafted[:10]) >= 2 and sum(drafted[100:]) < 12
    assert b.plain_rounds == 300 - sum(drafted)
    while not b.start_round():
        b.observe(bare, [[0]], [9])
    for _ in range(20):  # the text has become easy
        b.nodes([logs(0.8, 0.1)], TOKENS)
        b.observe(tree, [[0, 1]], [2])
        assert b.start_round()


# ---------------------------------------------------------------- decoding
def generate(model, ids, draft, **kwargs):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        **{"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True, **kwargs},
    )


@pytest.fixture
def known():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    text = generate(model, ids, None).sequences
    return model, ids, text


def test_the_injected_costs_decide_the_tree(known):
    model, ids, text = known
    draft = OracleDraft.for_texts(model, text, miss=0.0)
    draft.tree = TreeConfig(4, 3, 12, auto=True)
    sizes = {}
    for name, slope, level in (("free", 0.0, 0.0), ("dear nodes", 0.5, 0.0), ("dear levels", 0.0, 3.0)):
        draft.costs = CostCurve((0, 12), (1.0, 1.0 + 12 * slope), 0.01, level)
        out = generate(model, ids, draft)
        assert torch.equal(out.sequences, text)
        sizes[name] = (out.statistics.drafted_tokens / out.statistics.rounds, out.statistics.mean_accepted)
    assert sizes["free"][0] > 2 * sizes["dear nodes"][0]
    assert sizes["free"][1] > 3 and sizes["dear levels"][1] <= 1
    # a draft that costs ten target forwards is switched off
    draft.costs = CostCurve((0, 12), (1.0, 1.0), 10.0, 10.0)
    out = generate(model, ids, draft)
    assert torch.equal(out.sequences, text)
    assert out.statistics.plain_rounds > 0.8 * out.statistics.rounds


def test_equal_calls_with_equal_costs_grow_equal_trees(known):
    model, ids, _ = known
    draft = tiny_draft(model, vocab=60)
    draft.tree, draft.costs = "auto", CostCurve((0, 60), (1.0, 1.6), 0.05, 0.02)
    first, again = (generate(model, ids, draft).statistics for _ in range(2))
    assert first == again


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_measured_costs_leave_the_text_alone(name, rows):
    model = FAMILIES[name].build()
    ids = prompt(rows, 12)
    stock = generate(model, ids, None).sequences
    for draft in (OracleDraft.for_texts(model, stock), tiny_draft(model, vocab=60)):
        draft.tree = TreeConfig(4, 3, 12, auto=True)
        out = generate(model, ids, draft)
        assert torch.equal(out.sequences, stock)
        assert torch.equal(generate(model, ids, draft, do_sample=True, top_k=1).sequences, stock)


def test_costs_are_measured_once_for_each_context_range(known, monkeypatch):
    from gto_hf.decoding import costs

    model, ids, text = known
    draft = OracleDraft.for_texts(model, text)
    draft.tree = TreeConfig(4, 3, 12, auto=True)
    calls = []
    original = costs.measure_costs
    monkeypatch.setattr(costs, "measure_costs", lambda *a: calls.append(1) or original(*a))
    for _ in range(3):
        generate(model, ids, draft)
    assert len(calls) == 1
    generate(model, prompt(1, 300), draft, max_new_tokens=4)
    assert len(calls) == 2
    curve = original.__globals__["_curves"][model][draft]
    assert all(math.isfinite(c.target_seconds(5)) and c.draft > 0 for c in curve.values())


def test_auto_is_saved_with_the_draft_and_explained_when_misspelt(known, tmp_path):
    model, _, _ = known
    draft = tiny_draft(model, vocab=60)
    draft.tree = "auto"
    assert draft.tree == TreeConfig(8, 10, 60, auto=True)
    draft.save_pretrained(tmp_path)
    assert type(draft).from_pretrained(tmp_path).tree.auto
    with pytest.raises(TypeError, match='"auto"'):
        draft.tree = "automatic"
