# SPDX-License-Identifier: Apache-2.0
"""Groups, rewards and objective on hand-made cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gto_hf.gto import (
    count_groups,
    expected_acceptance,
    group_advantages,
    gto_loss,
    prefix_probs,
    roots_of,
    row_generators,
    row_seeds,
    sample_groups,
    supervised_steps,
    supervised_targets,
    tree_reward,
)
from gto_hf.tree import DraftTree


# root - a(1) - c(3)
#      \ b(2) - d(4)
TREE = DraftTree(
    tokens=torch.tensor([[9, 1, 2, 3, 4]]),
    parents=torch.tensor([[0, 0, 0, 1, 2]]),
    depths=torch.tensor([[0, 1, 1, 2, 2]]),
    scores=torch.zeros(1, 5),
)
LOG_PROBS = torch.tensor([[0.0, 0.5, 0.25, 0.5, 0.8]]).log()  # P: a .5, b .25, c .25, d .2


def test_rewards_by_hand():
    probs = prefix_probs(TREE, LOG_PROBS)
    torch.testing.assert_close(probs, torch.tensor([[1.0, 0.5, 0.25, 0.25, 0.2]]))
    torch.testing.assert_close(expected_acceptance(TREE, probs), torch.tensor([1.2]))
    a, b = 0.75, 0.45
    assert tree_reward(TREE, probs, "max").item() == pytest.approx(a)
    assert tree_reward(TREE, probs, "mean").item() == pytest.approx((a + b) / 2)
    assert tree_reward(TREE, probs, "nodes").item() == pytest.approx(1.2)
    assert tree_reward(TREE, probs, "lse").item() == pytest.approx(math.log(math.exp(a) + math.exp(b)))
    assert tree_reward(TREE, probs, "lse", 5.0).item() == pytest.approx(
        math.log(math.exp(5 * a) + math.exp(5 * b)) / 5
    )


def test_impossible_nodes_are_worth_nothing():
    log_probs = LOG_PROBS.clone()
    log_probs[0, 1] = -torch.inf
    probs = prefix_probs(TREE, log_probs)
    assert probs[0, 1] == probs[0, 3] == 0 and not probs.isnan().any()


@pytest.mark.parametrize("kwargs", [{"aggregation": "median"}, {"eta": 0.0}, {"eta": -1.0}, {"eta": math.inf}])
def test_unknown_aggregations_and_bad_eta_are_refused(kwargs):
    with pytest.raises(ValueError, match="aggregation|eta"):
        tree_reward(TREE, torch.ones(1, 5), **kwargs)


def test_advantages_by_hand():
    rewards, reference = torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    # relative rewards 2, 0: mean 1, population std 1
    torch.testing.assert_close(
        group_advantages(rewards, reference, 1e-4), torch.tensor([[1.0, -1.0], [0.0, 0.0]]), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        group_advantages(rewards, None, 1e-4), torch.tensor([[1.0, -1.0], [0.0, 0.0]]), atol=1e-3, rtol=0
    )


def test_groups_of_one_position_have_no_advantage():
    assert (group_advantages(torch.randn(5, 1), torch.randn(5, 1)) == 0).all()


def test_loss_by_hand_with_clipping_and_an_empty_path():
    log_probs = torch.tensor([[math.log(2.0), 0.0, -0.4]], requires_grad=True)
    reference = torch.tensor([[0.0, 0.0, 0.0]])
    lengths = torch.tensor([[1, 0, 2]])
    advantages = torch.tensor([[1.0, 1.0, -1.0]])
    result = gto_loss(log_probs, reference, lengths, advantages, 0.2)
    # s = 2 -> clipped to 1.2; s = 1; s = exp(-0.2) = 0.8187 (not clipped)
    assert result.loss.item() == pytest.approx(-(1.2 + 1.0 - math.exp(-0.2)) / 3)
    assert result.clipped.tolist() == [[True, False, False]]
    result.loss.backward()
    assert log_probs.grad[0, 0] == 0  # clipped
    assert log_probs.grad[0, 2].item() == pytest.approx(math.exp(-0.2) / 2 / 3)
    # with a negative advantage the lower bound is the one that clips
    low = torch.tensor([[math.log(0.5)]], requires_grad=True)
    result = gto_loss(low, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.long), torch.tensor([[-1.0]]), 0.2)
    assert result.loss.item() == pytest.approx(0.8) and result.clipped.item()


def test_an_empty_path_has_no_gradient_and_no_nan():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    result = gto_loss(log_probs * 0, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), torch.randn(1, 2))
    result.loss.backward()
    assert (log_probs.grad == 0).all() and (result.ratio == 1).all()


def test_targets_and_roots_by_hand():
    ids = torch.tensor([[5, 6, 7, 8, 2, 9, 9]])
    labels = torch.tensor([[5, 6, 7, 8, 2, 9, -100]])
    targets = supervised_targets(labels, ids, torch.tensor([2]))
    # positions 0 and 1 have no feature before their root; position 5 follows the end of sequence
    assert targets.tolist() == [[False, False, True, True, True, False, False]]
    assert roots_of(targets).tolist() == [[False, True, True, True, False, False, False]]
    steps = supervised_steps(targets, torch.tensor([[1, 2, 3]]), 3)
    assert steps.tolist() == [[[True, True, True], [True, True, False], [True, False, False]]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 1000),
)
def test_groups_are_adjacent_disjoint_supervised_and_as_many_as_counted(rows, num_groups, size, seed):
    roots = torch.tensor(rows)
    roots[:, 0] = False
    groups, valid = sample_groups(roots, num_groups, size, torch.Generator().manual_seed(seed))
    assert int(valid.sum()) == count_groups(roots, num_groups, size)
    for row, positions, real in zip(roots, groups, valid, strict=True):
        used = positions[real].flatten().tolist()
        assert len(used) == len(set(used)) and all(bool(row[p]) for p in used)
        for group in positions[real].tolist():
            assert group == list(range(group[0], group[0] + size))
        assert int(real.sum()) <= num_groups
        assert (positions[~real] == 1).all()


def test_every_root_of_a_long_run_can_be_drawn():
    roots = torch.ones(1, 12, dtype=torch.bool)
    roots[0, 0] = False
    seen = set()
    for seed in range(60):
        groups, _ = sample_groups(roots, 1, 4, torch.Generator().manual_seed(seed))
        seen.update(groups.flatten().tolist())
    assert seen == set(range(1, 12))


def test_a_rows_groups_depend_on_the_row_and_the_step_and_on_nothing_around_it():
    ids = torch.randint(3, 64, (3, 40))
    roots = torch.ones_like(ids, dtype=torch.bool)
    roots[:, 0], roots[1, 30:] = False, False
    valid = torch.ones_like(roots)
    valid[1, 31:] = False

    def groups_of(order, step=0, seed=0, width=40):
        own = row_generators(row_seeds(seed, step, ids[order][:, :width], valid[order][:, :width]))
        groups, real = sample_groups(roots[order][:, :width], 2, 3, own)
        return [g[r].tolist() for g, r in zip(groups, real, strict=True)]

    together = groups_of([0, 1, 2])
    assert groups_of([2, 0]) == [together[2], together[0]]
    assert groups_of([1], width=35) == groups_of([1]) == [together[1]]  # less padding
    assert any(groups_of([0], step=s) != [together[0]] for s in range(1, 5))
    assert any(groups_of([0], seed=s) != [together[0]] for s in range(1, 5))
    assert any(groups_of([0], step=s) != groups_of([2], step=s) for s in range(5))
