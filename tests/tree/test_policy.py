# SPDX-License-Identifier: Apache-2.0
"""The tree policy against the slow reference in tests/reference/naive_tree.py."""

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gto_hf.tree import DraftTree, Expansion, TreeConfig, grow_trees, stable_topk
from tests.reference.naive_tree import (
    ToyModel,
    naive_accepted,
    naive_ancestor_mask,
    naive_frontiers,
    naive_leaves,
    naive_tree,
)
from tests.tree.toy_draft import ToyDraft, fields


def modest(examples=50):
    return settings(max_examples=examples, deadline=None)


@st.composite
def drafts(draw, max_roots=3, levels=(None, None, 1, 2, 3, 8), impossible=(False, False, False, True)):
    """A function that makes a fresh ToyDraft of one random case; all its calls describe the same case."""
    depth, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    capacity = top_k + (depth - 1) * top_k**2
    total = draw(st.one_of(st.integers(1, capacity), st.just(1), st.just(capacity)))
    config = TreeConfig(depth=depth, top_k=top_k, total_tokens=total)
    vocab = draw(st.integers(top_k, top_k + 4))
    seed = draw(st.integers(0, 10**6))
    model = ToyModel(seed, vocab, draw(st.sampled_from(levels)), draw(st.sampled_from(impossible)))
    roots = draw(st.integers(1, max_roots))
    contexts = draw(st.lists(st.integers(0, 50), min_size=roots, max_size=roots))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=roots, max_size=roots))
    return lambda: ToyDraft(model, contexts, tokens, config)


def fixed(depth, top_k, total, roots=2, levels=None, seed=0):
    config = TreeConfig(depth=depth, top_k=top_k, total_tokens=total)
    model = ToyModel(seed, top_k + 3, levels)
    return lambda: ToyDraft(model, range(roots), [r % (top_k + 3) for r in range(roots)], config)


def assert_equals_reference(draft, tree):
    config = draft.config
    for name, value in fields(tree).items():
        assert value.shape == (len(draft.root_list), config.total_tokens + 1), name
    for r, (context, token) in enumerate(zip(draft.contexts, draft.root_list, strict=True)):
        expected = naive_tree(draft.model, context, token, config.depth, config.top_k, config.total_tokens)
        assert tree.tokens[r].tolist() == expected["tokens"]
        assert tree.parents[r].tolist() == expected["parents"]
        assert tree.depths[r].tolist() == expected["depths"]
        assert tree.scores[r].tolist() == pytest.approx(expected["scores"], rel=1e-5, abs=1e-5)


def assert_same(first, second):
    for name, value in fields(first).items():
        assert torch.equal(value, fields(second)[name]), name


# --- the policy ------------------------------------------------------------------------------------------------


@modest(150)
@given(drafts())
@example(fixed(1, 1, 1))  # a single node
@example(fixed(1, 6, 6))  # one level, full
@example(fixed(1, 6, 2))  # one level, pruned
@example(fixed(6, 1, 6))  # a chain
@example(fixed(6, 1, 3))  # a chain cut short
@example(fixed(5, 6, 1))  # only the best child
@example(fixed(4, 5, 80))  # every candidate
@example(fixed(4, 5, 79, levels=1))  # every candidate but one, all scores 0.0
def test_tree_for_any_shape_equals_the_slow_reference(make):
    draft = make()
    assert_equals_reference(draft, draft.grow())


@modest(100)
@given(drafts(levels=(1, 2, 2, 3), impossible=(False, False, True)))
def test_tree_with_many_equal_scores_equals_the_slow_reference(make):
    draft = make()
    assert_equals_reference(draft, draft.grow())


@pytest.mark.parametrize("levels", [None, 2])
def test_tree_with_the_default_config_equals_the_slow_reference(levels):
    draft = ToyDraft(ToyModel(7, 20, levels), [3, 4], [5, 5], TreeConfig())
    assert_equals_reference(draft, draft.grow())


def test_tree_when_all_scores_are_zero_keeps_the_first_candidates():
    tree = fixed(4, 3, 8, roots=1, levels=1)().grow()
    # Level 1 holds tokens 0, 1, 2; level 2 is expanded row by row, so rows 0 and 1 come before row 2.
    assert tree.tokens[0].tolist() == [0, 0, 1, 2, 0, 1, 2, 0, 1]
    assert tree.parents[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert tree.depths[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert tree.scores[0].tolist() == [0.0] * 9


def test_tree_for_an_example_worked_out_by_hand_is_that_tree():
    table = {
        (): [(-0.5, 4), (-1.0, 9)],
        (4,): [(-2.0, 1), (-2.5, 2)],  # scores -2.5, -3.0
        (9,): [(-0.25, 6), (-1.75, 7)],  # scores -1.25, -2.75
        (9, 6): [(-0.25, 3), (-4.0, 8)],  # scores -1.5, -5.25
        (4, 1): [(-0.125, 5), (-0.25, 0)],  # scores -2.625, -2.75
    }

    def expand(paths):
        return Expansion(
            log_probs=torch.tensor([[[lp for lp, _ in table[p]] for p in paths]]),
            tokens=torch.tensor([[[t for _, t in table[p]] for p in paths]]),
            features=torch.tensor([[[float(t) for t in (*p, -1, -1)[:2]] for p in paths]]),
        )

    def step(tokens, features, ancestors, depth):
        parents = [tuple(int(x) for x in row if x >= 0) for row in features[0].tolist()]
        return expand([p + (t,) for p, t in zip(parents, tokens[0].tolist(), strict=True)])

    config = TreeConfig(depth=3, top_k=2, total_tokens=7)
    tree = grow_trees(step, torch.tensor([11]), expand([()]), config)
    # Best seven: -0.5, -1.0, -1.25, -1.5, -2.5, -2.625 and, of the two with -2.75, the one that was scored first.
    assert tree.tokens[0].tolist() == [11, 4, 9, 1, 6, 7, 3, 5]
    assert tree.parents[0].tolist() == [0, 0, 0, 1, 2, 2, 4, 3]
    assert tree.depths[0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3]
    assert tree.scores[0].tolist() == [0.0, -0.5, -1.0, -2.5, -1.25, -2.75, -1.5, -2.625]


@modest()
@given(drafts(levels=(None, 1, 2, 3)))
def test_tree_for_any_shape_holds_every_parent_before_its_children(make):
    tree = make().grow()
    for r in range(tree.tokens.shape[0]):
        tokens, parents, depths, scores = (value[r].tolist() for value in fields(tree).values())
        assert (parents[0], depths[0], scores[0]) == (0, 0, 0.0)
        for i in range(1, len(tokens)):
            assert 0 <= parents[i] < i
            assert depths[i] == depths[parents[i]] + 1
            assert scores[i] <= scores[parents[i]]
        assert depths == sorted(depths)
        siblings = list(zip(parents[1:], tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings)


@modest()
@given(drafts(max_roots=4))
def test_tree_of_many_roots_equals_each_root_grown_alone(make):
    together = make()
    tree = together.grow()
    for r, (context, token) in enumerate(zip(together.contexts, together.root_list, strict=True)):
        alone = ToyDraft(together.model, [context], [token], together.config).grow()
        for name, value in fields(alone).items():
            assert torch.equal(value[0], fields(tree)[name][r]), name


@modest(30)
@given(drafts())
def test_tree_when_grown_twice_is_identical(make):
    assert_same(make().grow(), make().grow())


@modest(30)
@given(drafts())
def test_tree_when_grown_leaves_its_arguments_as_they_were(make):
    draft = make()
    root, root_tokens = draft.root(), draft.root_tokens.clone()
    grow_trees(draft.step, draft.root_tokens, root, draft.config)
    assert torch.equal(draft.root_tokens, root_tokens)
    fresh = make().root()
    for name in ("log_probs", "tokens", "features"):
        assert torch.equal(getattr(root, name), getattr(fresh, name)), name


@modest(30)
@given(drafts(levels=(None, 2)), st.integers(1, 6))
def test_tree_with_a_limited_config_equals_the_slow_reference_of_that_depth(make, limit):
    whole = make()
    draft = ToyDraft(whole.model, whole.contexts, whole.root_list, whole.config.limited(limit))
    tree = draft.grow()
    assert_equals_reference(draft, tree)
    assert tree.max_depth <= limit


# --- how step is called ----------------------------------------------------------------------------------------


@modest()
@given(drafts())
@example(fixed(1, 4, 4))
def test_step_for_any_depth_is_called_once_per_level_after_the_first(make):
    draft = make()
    draft.grow()
    assert draft.depths == list(range(1, draft.config.depth))


@modest()
@given(drafts(levels=(None, 2, 3)))
def test_step_at_every_level_gets_the_best_nodes_and_the_true_ancestors(make):
    draft = make()
    draft.grow()  # ToyDraft.step compares the ancestors mask with the paths at every call
    config = draft.config
    for r, (context, token) in enumerate(zip(draft.contexts, draft.root_list, strict=True)):
        expected = naive_frontiers(draft.model, context, token, config.depth, config.top_k)
        assert draft.levels[r] == expected


def test_ancestors_when_a_level_descends_from_one_node_only_are_one_chain():
    """A model whose best child wins by far: at every level the whole frontier hangs on the first node."""
    masks = []

    def step(tokens, features, ancestors, depth):
        masks.append(ancestors.clone())
        log_probs = torch.full((1, 2, 2), -0.125)
        log_probs[:, 1] = -50.0
        return Expansion(log_probs, torch.tensor([[[0, 1], [0, 1]]]), torch.zeros(1, 2, 1))

    root = Expansion(torch.tensor([[[0.0, -1.0]]]), torch.tensor([[[0, 1]]]), torch.zeros(1, 1, 1))
    grow_trees(step, torch.tensor([0]), root, TreeConfig(depth=4, top_k=2, total_tokens=5))
    yes, no = True, False
    assert [mask[0].tolist() for mask in masks] == [
        [[yes, no], [no, yes]],
        [[yes, no, yes, no], [yes, no, no, yes]],
        [[yes, no, yes, no, yes, no], [yes, no, yes, no, no, yes]],
    ]


# --- NaN -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_depth", [0, 1, 2, 3])
@pytest.mark.parametrize("where", [(0, 0), (1, 0), (1, -1)])
def test_grow_when_a_log_prob_is_nan_raises(bad_depth, where):
    draft = fixed(4, 3, 5)()
    root_index, child = where

    def spoil(expansion):
        log_probs = expansion.log_probs.clone()
        log_probs[root_index, -1, child] = math.nan
        return Expansion(log_probs, expansion.tokens, expansion.features)

    def step(tokens, features, ancestors, depth):
        result = draft.step(tokens, features, ancestors, depth)
        return spoil(result) if depth == bad_depth else result

    root = spoil(draft.root()) if bad_depth == 0 else draft.root()
    with pytest.raises(ValueError, match="(?i)nan"):
        grow_trees(step, draft.root_tokens, root, draft.config)


@modest(60)
@given(drafts(levels=(1, 2, 3, None)), st.data())
def test_grow_when_some_log_probs_are_nan_among_ties_raises(make, data):
    draft = make()
    bad_depth = data.draw(st.integers(0, draft.config.depth - 1))
    pick = random.Random(data.draw(st.integers(0, 10**6)))

    def spoil(expansion):
        log_probs = expansion.log_probs.clone()
        flat = log_probs.view(-1)
        for i in pick.sample(range(flat.numel()), pick.randint(1, flat.numel())):
            flat[i] = math.nan
        return Expansion(log_probs, expansion.tokens, expansion.features)

    def step(tokens, features, ancestors, depth):
        # The frontier below a NaN means nothing, so ToyDraft.step, which checks it, is not asked there.
        paths = [
            [draft._decode(f) + (t,) for f, t in zip(*row, strict=True)]
            for row in zip(features.tolist(), tokens.tolist(), strict=True)
        ]
        result = draft.expand(paths)
        return spoil(result) if depth == bad_depth else result

    root = spoil(draft.root()) if bad_depth == 0 else draft.root()
    with pytest.raises(ValueError, match="(?i)nan"):
        grow_trees(step, draft.root_tokens, root, draft.config)


def test_grow_when_two_children_are_nan_and_two_others_tie_raises():
    values = torch.tensor([[[math.nan, math.nan, -1.0], [-1.0, -2.0, -2.0], [-2.0, -2.0, -2.0]]])
    tokens = torch.arange(3).expand(1, 3, 3)
    root = Expansion(torch.zeros(1, 1, 3), tokens[:, :1], torch.zeros(1, 1, 1))
    config = TreeConfig(depth=3, top_k=3, total_tokens=4)
    with pytest.raises(ValueError, match="(?i)nan"):
        grow_trees(lambda *_: Expansion(values, tokens, torch.zeros(1, 3, 1)), torch.tensor([0]), root, config)


@pytest.mark.parametrize("k", [2, 4])
def test_grow_when_the_root_has_another_number_of_children_raises_and_names_both(k):
    root = Expansion(torch.zeros(1, 1, k), torch.arange(k).view(1, 1, k), torch.zeros(1, 1, 1))
    with pytest.raises(ValueError) as error:
        grow_trees(lambda *_: None, torch.tensor([0]), root, TreeConfig(depth=1, top_k=3, total_tokens=2))
    assert str(k) in str(error.value)
    assert "3" in str(error.value)


# --- stable_topk -----------------------------------------------------------------------------------------------


def assert_topk_equals_sorted(values, k):
    best, indices = stable_topk(values, k)
    assert best.dtype == values.dtype
    assert best.shape == indices.shape == (*values.shape[:-1], k)
    rows = values.reshape(-1, values.shape[-1]).tolist()
    for row, got_values, got in zip(rows, best.reshape(-1, k).tolist(), indices.reshape(-1, k).tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        assert got == expected
        assert got_values == [row[i] for i in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@modest(60)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 40),
    pool=st.lists(
        st.one_of(st.sampled_from([0.0, -0.0, -math.inf, -1.0]), st.floats(-20, 0, width=16)), min_size=1, max_size=5
    ),
    data=st.data(),
)
def test_stable_topk_with_ties_equals_a_stable_sort(dtype, rows, width, pool, data):
    k = data.draw(st.integers(1, width))
    pick = random.Random(data.draw(st.integers(0, 10**6)))
    values = torch.tensor([[pick.choice(pool) for _ in range(width)] for _ in range(rows)]).to(dtype)
    assert_topk_equals_sorted(values, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [17, 100, 710, 5000])
@pytest.mark.parametrize("k", [1, 10, 17])
def test_stable_topk_on_wide_rows_with_ties_equals_a_stable_sort(dtype, width, k):
    generator = torch.Generator().manual_seed(width)
    values = (torch.randint(0, 7, (2, 2, width), generator=generator) / -8).to(dtype)
    assert_topk_equals_sorted(values, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stable_topk_when_all_values_are_equal_takes_the_first_ones(dtype):
    values, indices = stable_topk(torch.full((2, 999), -3.0, dtype=dtype), 12)
    assert indices.tolist() == [list(range(12))] * 2
    assert values.tolist() == [[-3.0] * 12] * 2


# --- DraftTree -------------------------------------------------------------------------------------------------


@modest(80)
@given(drafts(), st.integers(0, 10**6))
def test_accepted_for_any_choices_equals_a_plain_walk(make, seed):
    draft = make()
    tree = draft.grow()
    pick = random.Random(seed)
    rows = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        row = []
        for i in range(len(tokens)):
            children = [tokens[j] for j in range(1, len(tokens)) if parents[j] == i]
            follow = children and pick.random() < 0.8
            row.append(pick.choice(children) if follow else pick.randrange(-1, draft.model.vocab + 1))
        rows.append(row)
    accepted = tree.accepted(torch.tensor(rows))
    assert accepted.dtype == torch.bool
    for r, row in enumerate(rows):
        assert accepted[r].tolist() == naive_accepted(tree.tokens[r].tolist(), tree.parents[r].tolist(), row)


def test_accepted_when_the_root_repeats_itself_is_the_root_alone():
    """The root is its own parent, but choosing the root token again does not step from the root to itself."""
    draft = ToyDraft(ToyModel(1, 4), [0], [99], TreeConfig(depth=2, top_k=2, total_tokens=4))
    accepted = draft.grow().accepted(torch.full((1, 5), 99))
    assert accepted.tolist() == [[True, False, False, False, False]]


def test_accepted_when_the_walk_breaks_early_leaves_out_all_that_lies_below():
    draft = ToyDraft(ToyModel(1, 1, levels=1), [0], [0], TreeConfig(depth=4, top_k=1, total_tokens=4))
    tree = draft.grow()  # a chain of zeros
    assert tree.accepted(torch.tensor([[0, 5, 0, 0, 0]])).tolist() == [[True, True, False, False, False]]
    assert tree.accepted(torch.tensor([[5, 0, 0, 0, 0]])).tolist() == [[True, False, False, False, False]]
    assert tree.accepted(torch.tensor([[0, 0, 0, 0, 5]])).tolist() == [[True] * 5]


@modest()
@given(drafts())
def test_ancestor_mask_for_any_tree_equals_a_climb_to_the_root(make):
    tree = make().grow()
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.tolist() == [naive_ancestor_mask(parents) for parents in tree.parents.tolist()]


@modest()
@given(drafts())
def test_leaves_for_any_tree_are_the_nodes_without_children(make):
    tree = make().grow()
    leaves = tree.leaves()
    assert leaves.dtype == torch.bool
    assert leaves.tolist() == [naive_leaves(parents) for parents in tree.parents.tolist()]


@modest(30)
@given(drafts())
def test_max_depth_for_any_tree_is_the_deepest_level_that_was_kept(make):
    tree = make().grow()
    assert tree.max_depth == max(max(row) for row in tree.depths.tolist())


def test_root_only_for_some_roots_holds_nothing_but_the_roots():
    tree = DraftTree.root_only(torch.tensor([7, 3, 7]))
    assert tree.tokens.tolist() == [[7], [3], [7]]
    assert tree.parents.tolist() == [[0]] * 3
    assert tree.depths.tolist() == [[0]] * 3
    assert tree.scores.tolist() == [[0.0]] * 3
    assert tree.scores.is_floating_point()
    assert tree.max_depth == 0
    assert tree.leaves().tolist() == [[True]] * 3
    assert tree.ancestor_mask().tolist() == [[[True]]] * 3
    assert tree.accepted(torch.tensor([[7], [0], [1]])).tolist() == [[True]] * 3
