# SPDX-License-Identifier: Apache-2.0
"""First guesses with neighbouring feature layers: a shifted draft is found out, a right one is not accused."""

import copy

import pytest
import torch

from gto_hf import check
from gto_hf.evaluation import LayerAgreement, layer_agreement
from gto_hf.gto import SequencePrefix
from tests.drafts.test_eagle3 import sequences
from tests.tiny import memorised_rows, tiny_draft, tiny_target, train_tiny


@pytest.fixture(scope="module")
def trained():
    """A target whose every layer outweighs those before it, so that neighbours differ, and a draft that knows its texts."""
    target = tiny_target()
    with torch.no_grad():
        for i, layer in enumerate(target.model.layers):
            mlp, out = layer.mlp, (layer.self_attn.o_proj, layer.mlp.down_proj)
            for part in (layer.self_attn.v_proj, mlp.up_proj, mlp.gate_proj, *out):
                part.weight *= 6
            for part in out:
                part.weight *= 2**i
    draft = tiny_draft(target)
    rows, prompts = memorised_rows(target, count=4, length=40)
    train_tiny(draft, target, rows, steps=80)
    return target, draft, prompts


def shifted(draft, by):
    """The draft as its config would be with another numbering."""
    moved = copy.deepcopy(draft)
    moved.config.feature_layers = [k + by for k in draft.config.feature_layers]
    return moved


@pytest.mark.parametrize("by", [-1, 1])
def test_a_draft_with_shifted_layers_is_told_the_right_ones(trained, by, capsys):
    target, draft, prompts = trained
    report = check(target, shifted(draft, by), prompts=list(prompts))
    assert report.agreement.better == -by
    assert "`feature_layers=[2, 4, 5]`" in capsys.readouterr().out


def test_a_right_draft_is_not_accused(trained):
    target, draft, prompts = trained
    report = check(target, draft, prompts=list(prompts), verbose=False)
    assert report.agreement.better is None and set(report.agreement.agreeing) == {-1, 0, 1}
    assert report.agreement.rate() > max(report.agreement.rate(s) for s in (-1, 1))
    assert "as configured" in str(report)


def test_guesses_are_those_of_the_training_path(trained):
    """The same pairs as every root of the token loss: features 0..r-1 and tokens 1..r give a guess of token r + 1."""
    target, draft, prompts = trained
    found = layer_agreement(target, draft, prompts[:1], new_tokens=8)
    prompt = prompts[:1]
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    roots = torch.arange(1, ids.shape[1])
    with torch.no_grad():
        best = target(ids).logits[0, 1:].argmax(-1)
        first = SequencePrefix(draft, sequences(target, draft, ids)).unrolled_logits(roots[None], 1)[0]
    guesses = draft.to_target_ids(first[0].argmax(-1))
    assert found.positions == len(roots) and found.agreeing[0] == int((guesses == best).sum()) > 0


def test_shifts_that_leave_the_target_are_not_tried(trained):
    target, _, prompts = trained
    draft = tiny_draft(target)
    draft.config.feature_layers = [0, 4, 8]
    assert set(layer_agreement(target, draft, prompts[:1]).agreeing) == {0}


def test_clearly_means_more_than_noise():
    assert LayerAgreement([2, 4, 5], 20, {-1: 9, 0: 6, 1: 0}).better is None  # 15 points, but of 20 positions
    assert LayerAgreement([2, 4, 5], 1000, {-1: 450, 0: 300, 1: 0}).better == -1
    assert LayerAgreement([2, 4, 5], 100000, {-1: 0, 0: 30000, 1: 35000}).better is None  # certain, but small
