# SPDX-License-Identifier: Apache-2.0
"""Sums and figures against values worked out by hand, and expected against observed acceptance."""

import json
import math

import pytest
import torch

from gto_hf import TreeConfig, record_rounds
from gto_hf.decoding import DecodingStatistics, RoundTimes, RoundTrace
from gto_hf.evaluation import Counts, expected_acceptance, simulated_tau
from gto_hf.evaluation.session import Deliveries, end_tokens
from gto_hf.tree import DraftTree
from tests.tiny import EOS, tiny_draft, tiny_target


def statistics(*rounds):
    found = DecodingStatistics()
    found.start(1)
    for accepted, bonus in rounds:
        found.add_rounds([(accepted, bonus)], 10)
    return found


def answered(*rounds, seconds=1.0):
    found = statistics(*rounds)
    return Counts(
        statistics=found,
        answers=1,
        tokens=found.emitted_tokens,
        seconds=seconds,
        first_seconds=0.25,
        first_tokens=1,
        tau_sum=found.tau if found.rounds else 0.0,
        tau_answers=int(found.rounds > 0),
    )


def test_acceptance_by_depth_by_hand():
    found = statistics((2, True), (0, True), (3, False), (2, True))  # reached depth 1, 2, 3: 3, 3 and 1 of 4 rounds
    assert found.acceptance_by_depth() == pytest.approx([3 / 4, 3 / 4, 1 / 4])
    assert found.acceptance_by_depth(conditional=True) == pytest.approx([3 / 4, 1, 1 / 3])
    assert sum(found.acceptance_by_depth()) == pytest.approx(found.mean_accepted)
    assert math.prod(found.acceptance_by_depth(conditional=True)) == pytest.approx(1 / 4)
    assert statistics().acceptance_by_depth() == [] == statistics((0, True)).acceptance_by_depth()


def test_the_edge_rules_by_hand():
    ended_at_once = answered()  # the prefill's token was EOS: no round
    cut_by_eos = answered((1, True), (2, False))  # the second drafted token of the last round is the EOS
    cut_by_length = answered((3, True), (0, True))  # the bonus token was the last one that fits
    total = ended_at_once + cut_by_eos + cut_by_length
    assert total.answers == 3 and total.tokens == 1 + 5 + 6 and total.tau_answers == 2
    assert total.statistics.accepted_tokens == 6 and total.statistics.bonus_tokens == 3
    assert total.tau_micro == pytest.approx(9 / 4)
    assert total.tau_macro == pytest.approx((4 / 2 + 5 / 2) / 2)
    assert total.tau_without_bonus == pytest.approx(6 / 4)
    assert total.tokens_per_second == pytest.approx(12 / 3)
    assert total.tokens_per_second_after_prefill == pytest.approx(9 / 2.25)
    assert math.isnan(ended_at_once.tokens_per_second_after_prefill)


def test_sums_merge_in_any_order_and_survive_json():
    a, b = answered((1, True), seconds=2.0), answered((0, True), (4, False), seconds=0.5)
    a.add_times([RoundTimes(target=0.5, draft=0.2, processors=0.1, total=1.0)])
    a.greedy_histogram, b.greedy_histogram = [1, 2], [0, 0, 0, 1]
    assert (a + b).to_dict() == (b + a).to_dict() and a + Counts() == a == sum([a], Counts())
    assert (a + b).greedy_histogram == [1, 2, 0, 1] and (a + b).statistics == a.statistics + b.statistics
    assert Counts.from_dict(json.loads(json.dumps((a + b).to_dict()))) == a + b
    figures = a.figures()
    assert (figures["target_share"], figures["draft_share"], figures["host_share"]) == pytest.approx((0.5, 0.2, 0.2))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert Counts().figures()["tau_micro"] is None and math.isnan(Counts().tau_macro)


def test_a_chain_is_simulated_from_joint_counts():
    assert simulated_tau([0.7, 0.5, 0.4]) == pytest.approx(2.19)
    counts = Counts(traced_rounds=10, greedy_histogram=[3, 3, 2, 2])  # 7, 4 and 2 rounds reach depth 1, 2 and 3
    assert counts.tau_chain == pytest.approx(1 + 1.3) == simulated_tau([7 / 10, 4 / 7, 2 / 4])


def trace(tokens, parents, probabilities, emitted, greedy):
    """Columns after the root; probabilities are the target's, of each node after its parent."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    tree = DraftTree(
        tokens=torch.tensor([[9, *tokens]]),
        parents=torch.tensor([[0, *parents]]),
        depths=torch.tensor([depths]),
        scores=torch.zeros(1, len(tokens) + 1),
    )
    return RoundTrace(0, 5, tree, torch.tensor([1.0, *probabilities]).log(), [0], emitted, greedy, [])


def test_expected_acceptance_by_hand():
    # root -> 3 (0.5) -> 4 (0.4), root -> 5 (0.3) -> 6 (0.5): 0.5 + 0.2 + 0.3 + 0.15
    tree = trace([3, 5, 4, 6], [0, 0, 1, 2], [0.5, 0.3, 0.4, 0.5], [3, 8], [3, 4])
    assert expected_acceptance(tree) == pytest.approx(1.15)
    assert expected_acceptance(tree, {5}) == pytest.approx(1.0)  # 5 may be emitted, 6 can no longer be


def test_recorded_rounds_by_hand():
    counts = Counts()
    first = trace([3, 5, 4], [0, 0, 1], [0.5, 0.3, 0.4], [5, 9], [3, 4])  # another path than the greedy one
    counts.add_traces([first])
    assert (counts.traced_rounds, counts.observed_accepted, counts.greedy_pruned, counts.greedy_path) == (1, 1, 0, 0)
    assert counts.greedy_histogram == [1]
    counts.add_traces([trace([3, 5], [0, 0], [0.5, 0.3], [3, 4], [3, 4])])  # 4 was pruned, and would have been right
    assert counts.greedy_pruned == 1 and counts.greedy_path == 1 and counts.greedy_histogram == [1, 0, 1]
    assert counts.observed == 1.0 and counts.greedy_accepted == 1.0 and counts.tau_chain == 2.0
    assert counts.figures()["greedy_path_pruned"] == 0.5


def test_rounds_of_stock_assistance_by_hand():
    deliveries = Deliveries()
    for size in (5, 2, 3, 1):  # the prompt, then what came out
        deliveries.put(torch.zeros(1, size))
    found = deliveries.statistics()
    assert deliveries.sizes == [2, 3, 1] and len(deliveries.seconds) == 3
    # the first forward is the prefill, whatever it delivered; then rounds of 2 + 1 and 0 + 1 tokens
    assert found.rounds == 2 and found.accepted_histogram == [1, 0, 1] and found.tau == pytest.approx(4 / 2)
    assert found.emitted_tokens == 6 and found.target_forwards == 3


def test_observed_acceptance_is_the_expected_one_at_temperature_1():
    target = tiny_target(sharpness=14.0)
    draft = tiny_draft(target, vocab=64, tree=TreeConfig(3, 6, 24))
    counts, squares = Counts(), 0.0
    prompts = torch.tensor([[5, 9, 11, 30]] * 100)
    torch.manual_seed(0)
    with record_rounds() as recorder:
        target.generate(
            prompts, attention_mask=torch.ones_like(prompts), assistant_model=draft, max_new_tokens=6, do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0,
        )  # fmt: skip
    for row in range(len(prompts)):
        one = Counts()
        one.add_traces([trace for trace in recorder.rounds if trace.row == row], end_tokens(target))
        squares += (one.expected_accepted - one.observed_accepted) ** 2
        counts += one
    assert end_tokens(target) == [EOS] and counts.observed_accepted > 40
    # The differences of the rows have mean 0: their sum stays within 4 standard deviations.
    assert abs(counts.expected_accepted - counts.observed_accepted) < 4 * math.sqrt(squares)
