# SPDX-License-Identifier: Apache-2.0
"""Greedy path against tree, counted by hand and against properties that must hold."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gto_hf.decoding.trace import RoundTrace
from gto_hf.evaluation.misalignment import (
    Misalignment,
    accepted_columns,
    misalignment,
    misalignment_table,
    node_columns,
)
from gto_hf.tree import DraftTree


def make_tree(root, paths):
    """The one-row tree whose nodes spell `paths` (tuples of tokens, shorter before longer)."""
    column = {(): 0}
    tokens, parents, depths = [root], [0], [0]
    for path in paths:
        column[path] = len(tokens)
        tokens.append(path[-1])
        parents.append(column[path[:-1]])
        depths.append(len(path))
    scores = [-0.5 * depth for depth in depths]
    return DraftTree(*(torch.tensor([row]) for row in (tokens, parents, depths, scores)))


def make_trace(length, root, paths, emitted, greedy, *, row=0):
    tree = make_tree(root, paths)
    accepted = node_columns(tree, emitted)
    target = torch.full((tree.tokens.shape[1],), -1.0)
    return RoundTrace(row, length, tree, target, [0, *accepted], emitted, greedy, [-0.5] * len(greedy))


# One call of row 0 from 10 known tokens on: it writes 1 2 3 | 4 | 5 6 7.
FIRST = [
    make_trace(10, 9, [(1,), (1, 2)], [1, 2, 3], [1, 2, 3]),  # kept 2 of 3; on the path; alone 3, tree 2
    make_trace(13, 3, [(8,), (8, 5)], [4], [8, 5]),  # kept; accepts nothing; alone 0, tree 0
    make_trace(14, 4, [(5,), (7,), (5, 6)], [5, 6, 7], [7, 6, 1]),  # kept 1 of 3; not on the path; alone 0, tree 2
]
# A later call of the same row, shorter: it writes 5 6 | 7, and the stop rule cuts the bonus of the second round.
SECOND = [
    make_trace(4, 2, [(6,)], [5], [5, 6, 7, 8]),  # nothing kept; alone 3 of the call's 5 6 7, tree 0
    make_trace(5, 5, [(6,), (6, 7), (6, 7, 8)], [6, 7], [6, 7, 8]),  # kept; alone 2: nothing was written after; tree 2
]


def test_one_call_by_hand():
    assert misalignment(FIRST) == Misalignment(3, 2 / 3, 2 / 3, 3 / 3, 4 / 3)


def test_two_calls_of_a_row_by_hand():
    result = misalignment([*FIRST, *SECOND])
    assert result.rounds == 5
    assert result.pruned == pytest.approx(3 / 5)
    assert result.greedy_accepted_path == pytest.approx(4 / 5)
    assert result.greedy_accepted == pytest.approx((3 + 0 + 0 + 3 + 2) / 5)
    assert result.tree_accepted == pytest.approx((2 + 0 + 2 + 0 + 2) / 5)


def test_a_greedy_path_reaches_into_following_rounds_but_not_into_another_call():
    first = make_trace(10, 9, [(4,)], [1], [1, 2, 3])
    follow = make_trace(11, 1, [(4,)], [2, 3], [2])
    assert misalignment([first, follow]).greedy_accepted == (3 + 1) / 2
    other_length = make_trace(12, 1, [(4,)], [2, 3], [2])
    assert misalignment([first, other_length]).greedy_accepted == (1 + 1) / 2
    same_length_again = make_trace(10, 1, [(4,)], [2, 3], [2])
    assert misalignment([first, same_length_again]).greedy_accepted == (1 + 1) / 2
    other_root = make_trace(11, 7, [(4,)], [2, 3], [2])  # the length fits by chance, the known text does not
    assert misalignment([first, other_root]).greedy_accepted == (1 + 1) / 2


def test_rows_of_a_batch_may_be_interleaved():
    other = [dataclasses.replace(trace, row=1) for trace in SECOND]
    mixed = [FIRST[0], other[0], FIRST[1], other[1], FIRST[2]]
    assert misalignment(mixed) == misalignment([*FIRST, *SECOND])


def test_given_texts_stand_in_for_rounds_that_were_not_recorded():
    text = [0] * 9 + [9, 1, 2, 3, 4, 5, 6, 7]
    late = make_trace(13, 3, [(8,)], [4], [4, 5, 6, 8])
    assert misalignment([late]).greedy_accepted == 1
    assert misalignment([late], {0: text}).greedy_accepted == 3
    assert misalignment([late], {1: text}).greedy_accepted == 1
    assert misalignment(FIRST, {0: text}) == misalignment(FIRST)
    with pytest.raises(ValueError, match="row 0 holds .* from position 4"):
        misalignment([*FIRST, *SECOND], {0: text})


def test_a_stop_rule_on_a_drafted_token_counts_it_as_accepted():
    cut = SECOND[1]
    assert accepted_columns(cut) == [1, 2]
    as_walked = dataclasses.replace(cut, path=cut.path[:-1])  # without the column of the last emitted token
    assert misalignment([as_walked]) == misalignment([cut])


def test_rounds_without_a_draft_are_neither_pruned_nor_off_the_path():
    bare = RoundTrace(0, 5, DraftTree.root_only(torch.tensor([3])), torch.zeros(1), [0], [4], [], [])
    assert misalignment([bare]) == Misalignment(1, 0.0, 1.0, 0.0, 0.0)


def test_no_rounds_give_nan_and_a_dash():
    empty = misalignment([])
    assert empty.rounds == 0
    assert all(math.isnan(value) for value in dataclasses.astuple(empty)[1:])
    assert misalignment_table({"a|b": empty}).splitlines()[-1] == "| a\\|b | 0 | - | - | - | - |"


def test_table_by_hand():
    lines = misalignment_table({"first": misalignment(FIRST), "second": misalignment(SECOND)}).splitlines()
    assert lines[2] == "| first | 3 | 67 % | 67 % | 1.00 | 1.33 |"
    assert lines[3] == "| second | 2 | 50 % | 100 % | 2.50 | 1.00 |"
    assert len({line.count(" | ") for line in (lines[0], *lines[2:])}) == 1


@st.composite
def calls(draw):
    """Rounds of one call over three tokens, with random trees, paths and text."""
    text = draw(st.lists(st.integers(0, 2), min_size=2, max_size=14))
    at, rounds = 1, []
    while at < len(text):
        branches = draw(st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=5))
        greedy = draw(st.lists(st.integers(0, 2), max_size=4))
        paths = {branch[:end] for branch in branches for end in range(1, len(branch) + 1)}
        paths = sorted(paths, key=lambda path: (len(path), path))
        accepted = len(node_columns(make_tree(0, paths), text[at:]))
        rounds.append(make_trace(at, text[at - 1], paths, text[at : at + accepted + 1], greedy))
        at += len(rounds[-1].emitted)
    return text, rounds


@given(calls())
@settings(max_examples=100, deadline=None)
def test_properties_of_any_call(call):
    text, rounds = call
    result = misalignment(rounds)
    assert result == misalignment(rounds, {0: text})
    assert 0 <= result.pruned <= 1 and 0 <= result.greedy_accepted_path <= 1
    assert result.greedy_accepted <= sum(len(trace.greedy) for trace in rounds) / len(rounds)
    for trace in rounds:
        alone = misalignment([trace], {0: text})
        starts = {tuple(text[trace.length : end]) for end in range(trace.length + 1, len(text) + 1)}
        assert alone.tree_accepted == len(starts & spelled(trace.tree))
        if not alone.pruned:  # the tree holds the path, so it accepts at least as much
            assert alone.greedy_accepted <= alone.tree_accepted
        if alone.greedy_accepted_path:
            assert alone.greedy_accepted >= alone.tree_accepted


def spelled(tree):
    """The paths of a one-row tree below its root, as tuples of tokens."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths = [()]
    for column in range(1, len(tokens)):
        paths.append((*paths[parents[column]], tokens[column]))
    return set(paths[1:])
