# SPDX-License-Identifier: Apache-2.0
"""Losses between two distributions, against their formulas and finite differences."""

import pytest
import torch

from gto_hf.gto import TOKEN_OBJECTIVES


@pytest.fixture
def pair():
    """Draft logits (3, 5) and target logits of 5 of 9 tokens, with the normaliser of all 9."""
    torch.manual_seed(0)
    whole = torch.randn(3, 9, dtype=torch.float64) * 2
    return torch.randn(3, 5, dtype=torch.float64, requires_grad=True), whole[:, :5], whole.logsumexp(-1)


def test_kl_is_the_soft_cross_entropy_over_the_drafts_vocabulary(pair):
    logits, teacher, normaliser = pair
    expected = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(TOKEN_OBJECTIVES["kl"](logits, teacher, normaliser), expected)


def test_lk_counts_what_the_draft_cannot_say_as_lost(pair):
    logits, teacher, normaliser = pair
    p, q = (teacher - normaliser[:, None]).exp(), logits.softmax(-1)
    assert (p.sum(-1) < 1).all()
    shared = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(TOKEN_OBJECTIVES["lk"](logits, teacher, normaliser), -shared.log())
    mix = (-3 * shared).exp()
    kl = -(teacher.softmax(-1) * q.log()).sum(-1)
    expected = mix * kl + (1 - mix) * (1 - shared)
    torch.testing.assert_close(TOKEN_OBJECTIVES["lk_hybrid"](logits, teacher, normaliser), expected)


@pytest.mark.parametrize("name", sorted(TOKEN_OBJECTIVES))
def test_gradients_match_finite_differences(pair, name):
    logits, teacher, normaliser = pair
    # One teacher row serves several draft rows, as for unrolled steps.
    stacked = torch.stack([logits, logits * 0.5]).detach().requires_grad_()
    if name != "lk_hybrid":  # its mixing weight carries no gradient, by definition
        assert torch.autograd.gradcheck(lambda x: TOKEN_OBJECTIVES[name](x, teacher, normaliser), stacked)
    value = TOKEN_OBJECTIVES[name](stacked, teacher, normaliser)
    assert value.shape == (2, 3) and (value >= 0).all()
    (grad,) = torch.autograd.grad(value.sum(), stacked)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0


@pytest.mark.parametrize("name", sorted(TOKEN_OBJECTIVES))
def test_the_targets_own_distribution_is_the_minimum(name):
    torch.manual_seed(1)
    teacher = torch.randn(4, 6)
    best = TOKEN_OBJECTIVES[name](teacher, teacher, teacher.logsumexp(-1))
    for seed in range(5):
        torch.manual_seed(seed)
        other = TOKEN_OBJECTIVES[name](teacher + torch.randn(4, 6), teacher, teacher.logsumexp(-1))
        assert (other > best).all()
