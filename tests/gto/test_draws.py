# SPDX-License-Identifier: Apache-2.0
"""Sampled paths: the target's distribution, and the same draw for the same node wherever it is scored."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from gto_hf.gto.draws import _mix, drawn_tokens, node_draws
from gto_hf.gto.sequences import Sequences
from gto_hf.gto.trie import build_trie
from gto_hf.tree import DraftTree
from tests.gto.plans import batch_of, perturbed, plan_for
from tests.gto.random_trees import VOCAB, random_trees
from tests.tiny import tiny_draft


def test_tokens_follow_the_distribution_and_impossible_ones_never_come():
    torch.manual_seed(0)
    scores = torch.randn(12) * 2
    scores[[0, 5, 11]] = -torch.inf
    draws = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]  # 0 included, 1 never
    counts = drawn_tokens(scores.expand(len(draws), -1), draws).bincount(minlength=12)
    assert counts[[0, 5, 11]].sum() == 0
    torch.testing.assert_close(counts / len(draws), scores.softmax(-1), atol=1e-4, rtol=0)


def test_the_mixer_is_splitmix64():
    # The first outputs of the published generator at seed 1234567.
    state = torch.tensor([1234567], dtype=torch.long)
    found = []
    for _ in range(3):
        found.append(int(_mix(state)) % 2**64)
        state = state + (0x9E3779B97F4A7C15 - 2**64)
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def paths_of(llama, rows, seeds, shift=None):
    """For each row, the accepted paths of six roots under 20 seeds."""
    reference = tiny_draft(llama)
    draft, batch = perturbed(reference), batch_of(llama, rows, pad_left=shift is not None)
    groups = torch.tensor([[[4, 5, 6], [8, 9, 10]]] * len(rows)) + (0 if shift is None else shift)
    valid = torch.ones(len(rows), 2, dtype=torch.bool)
    found = [[] for _ in rows]
    for n in range(20):
        plan, *_ = plan_for(
            llama, draft, reference, batch, groups=groups, valid=valid, sample=torch.tensor(seeds) + 10 * n
        )
        lengths, paths = plan.lengths.view(len(rows), -1), plan.paths.view(len(rows), 6, -1)
        for own, some, path in zip(found, lengths.tolist(), paths.tolist(), strict=True):
            own.extend(tokens[:length] for length, tokens in zip(some, path, strict=True))
    return found


def test_sampled_paths_follow_the_seed_and_nothing_else(llama, rows):
    together = paths_of(llama, rows, [1, 2, 3])
    assert all(sum(map(bool, paths)) > 4 for paths in together)  # enough of them accept something
    assert together == [paths_of(llama, [row], [seed])[0] for row, seed in zip(rows, (1, 2, 3), strict=True)]
    last, first, second = paths_of(llama, [rows[2], rows[0], rows[1]], [3, 1, 2])
    assert together == [first, second, last]
    assert together[0] != paths_of(llama, rows[:1], [4])[0]


def test_padding_on_the_left_draws_the_same_paths(llama, rows):
    padded = paths_of(
        llama, rows[:2], [1, 2], shift=torch.tensor([0, 5])[:, None, None]
    )  # the second has 13 of 18 tokens
    assert padded == paths_of(llama, rows[:2], [1, 2])


def test_a_node_is_drawn_as_often_as_the_target_says(llama, rows):
    """First tokens of sampled paths over many seeds, against the probabilities that the plan itself is scored with."""
    accepted = torch.zeros(6)
    draws = 200
    expected = None
    reference = tiny_draft(llama)
    groups, valid = torch.tensor([[[4, 5, 6], [8, 9, 10]]]), torch.ones(1, 2, dtype=torch.bool)
    for seed in range(draws):
        plan, *_ = plan_for(
            llama, reference, reference, batch_of(llama, rows[:1]), groups=groups, valid=valid,
            sample=torch.tensor([seed]), temperature=2.0,
        )  # fmt: skip
        accepted += plan.lengths.flatten()
        expected = plan.expected.flatten()
    # The mean length of sampled paths is the expected acceptance: the same tree, the same distribution.
    assert expected.min() > 0
    error = (3 * expected / draws).sqrt()  # lengths are at most 3, so their variance is at most 3 times their mean
    assert ((accepted / draws - expected).abs() < 4 * error).all()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), pad=st.integers(0, 3))
@example(seed=160, pad=0)  # nodes below the last slot of the last row
def test_a_nodes_number_is_its_path_whatever_text_may_be_stood_on(seed, pad):
    """Which logits of the text are at hand depends on the other rows of a batch; padding on its layout."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (2, 9), generator=generator)
    roots = torch.stack([torch.randperm(6, generator=generator)[:3].sort().values + 1 for _ in range(2)])
    trees = random_trees(generator, roots.tolist(), text, 8)
    keep, seeds = torch.ones(6, dtype=torch.bool), torch.tensor([3, 4])

    def numbers(rows, on_text, left=0):
        ids = torch.nn.functional.pad(text[rows], (left, 0))
        valid = torch.arange(ids.shape[1]).expand_as(ids) >= left
        some = [row * 3 + j for row in rows for j in range(3)]
        own = DraftTree(trees.tokens[some], trees.parents[some], trees.depths[some], trees.scores[some])
        stands = torch.nn.functional.pad(on_text[rows], (left, 0))
        trie = build_trie([own], roots[rows] + left, keep[some], ids, stands & valid, VOCAB)
        sequences = Sequences(ids, torch.zeros(*ids.shape, 1), valid, valid.cumsum(1) - 1)
        return node_draws(trie, seeds[rows], sequences)[trie.ids[0]]

    everywhere = torch.ones(2, 9, dtype=torch.bool)
    whole = numbers([0, 1], everywhere)
    assert torch.equal(whole, numbers([0, 1], torch.arange(9).expand(2, -1) < 5))
    assert torch.equal(whole[3:], numbers([1], everywhere, left=pad))
    assert torch.equal(whole[:3], numbers([0], torch.rand(2, 9, generator=generator) < 0.5))


def test_draws_of_different_nodes_are_uniform_and_independent():
    seeds = torch.arange(4000)
    draws = (_mix(seeds) >> 11 & ((1 << 53) - 1)).double() / 2**53
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    after = (_mix(_mix(seeds) + _mix(torch.tensor(7))) >> 11 & ((1 << 53) - 1)).double() / 2**53
    assert abs(stats.pearsonr(draws.numpy(), after.numpy()).statistic) < 0.06


@pytest.mark.parametrize("shape", [(0, 5), (3, 1)])
def test_edges(shape):
    scores = torch.zeros(shape)
    assert drawn_tokens(scores, torch.zeros(shape[0], dtype=torch.float64)).tolist() == [0] * shape[0]
