# SPDX-License-Identifier: Apache-2.0
"""Weights of unrolled steps against plain loops, and what a loss makes of them."""

import pytest
import torch

from gto_hf.gto import (
    decay_weights,
    dpace_weights,
    read_target,
    roots_of,
    supervised_steps,
    supervised_targets,
    token_loss,
)
from gto_hf.gto.groups import padded_positions
from gto_hf.gto.sequences import SequencePrefix
from tests.gto.plans import EOS_IDS, batch_of
from tests.tiny import tiny_draft


STEPS, DECAY = 3, 0.8


@pytest.fixture
def batch(llama, rows):
    """What a token loss reads of three uneven rows."""
    ids, mask, labels = batch_of(llama, rows)
    draft = tiny_draft(llama, vocab=40)
    targets = supervised_targets(labels, ids, EOS_IDS)
    roots, real = padded_positions(roots_of(targets))
    supervised = supervised_steps(targets, roots, STEPS) & real[..., None]
    reading = read_target(llama, ids, mask, list(draft.config.feature_layers), 0, ids.shape[1], use_cache=False)
    features = SequencePrefix(draft, reading.sequences).unrolled(roots, STEPS)
    return draft, ids, roots, supervised, reading.readout, features


def naive(draft, features, ids, roots, supervised, smoothing):
    """One root and one step at a time."""
    found = torch.zeros(supervised.shape)
    for b in range(len(roots)):
        for n, root in enumerate(roots[b].tolist()):
            steps = int(supervised[b, n].sum())  # supervision ends where it ends
            reached = []
            for k in range(steps):
                token = int(ids[b, root + 1 + k])
                probs = draft.head(features[k][b, n]).softmax(-1)
                where = draft.kept_ids.tolist().index(token) if token in draft.kept_ids.tolist() else None
                smoothed = smoothing + (1 - smoothing) * (0.0 if where is None else float(probs[where]))
                reached.append(smoothed * (reached[-1] if reached else 1.0))
            for k in range(steps):
                found[b, n, k] = sum(reached[k:])
    return found * (1 + DECAY + DECAY**2) / 6


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("elements", [1, 500, 2**26])
def test_dpace_weights_equal_plain_loops(batch, smoothing, elements):
    draft, ids, roots, supervised, _, features = batch
    with torch.no_grad():
        wanted = naive(draft, features, ids, roots, supervised, smoothing)
    found = dpace_weights(draft, features, ids, roots, supervised, DECAY, smoothing=smoothing, elements=elements)
    assert not found.requires_grad and wanted.gt(0).any()
    torch.testing.assert_close(found, wanted)


def test_a_draft_that_is_always_right_weighs_as_much_as_the_fixed_weights(batch):
    draft, ids, roots, supervised, _, features = batch
    found = dpace_weights(draft, features, ids, roots, supervised, DECAY, smoothing=1.0)
    whole = supervised.all(-1)
    assert whole.any()
    fixed = decay_weights(supervised, DECAY)
    torch.testing.assert_close(found[whole].sum(-1), fixed[whole].sum(-1))
    assert (found[~supervised] == 0).all()


def test_weights_change_each_steps_share_of_the_loss_and_of_its_gradient(batch):
    draft, ids, roots, supervised, readout, features = batch

    def loss(weights, elements=2**26):
        found = token_loss(draft, features, readout, roots, supervised, DECAY, weights=weights, elements=elements)
        gradient = torch.autograd.grad(found.loss, features, retain_graph=True)
        return found.loss, gradient

    fixed = decay_weights(supervised, DECAY)
    plain, given = loss(None), loss(fixed)
    torch.testing.assert_close(plain, given, atol=0, rtol=0)
    each = []
    for k in range(STEPS):
        only = torch.zeros_like(fixed)
        only[..., k] = fixed[..., k]
        value, gradient = loss(only, elements=100)
        assert all(not g.any() for j, g in enumerate(gradient) if j != k)
        each.append(value)
    torch.testing.assert_close(sum(each), plain[0])
    torch.manual_seed(0)
    random = torch.rand(fixed.shape)
    torch.testing.assert_close(loss(random)[0] * 2, loss(random * 2)[0])


def test_a_batch_that_teaches_nothing(batch):
    draft, ids, roots, supervised, _, features = batch
    none = torch.zeros_like(supervised)
    assert not dpace_weights(draft, features, ids, roots, none, DECAY).any()
