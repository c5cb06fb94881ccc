# SPDX-License-Identifier: Apache-2.0
"""The self-test: right on sound pairs, and it finds what it is there to find."""

import pytest
import torch

import gto_hf
from gto_hf.evaluation import lossless
from gto_hf.tree import DraftTree
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_target


def test_a_sound_pair_is_ready(llama, draft, capsys):
    report = gto_hf.check(llama, draft, full=True, prompts=[prompt(1, 9)[0], prompt(1, 5)[0].tolist()])
    assert report.ok and report.route == "tree" and report.tree_error < 1e-5
    assert report.lossless.identical == report.lossless.prompts == 2 and not report.lossless.divergences
    assert "verdict: ready to use" in capsys.readouterr().out
    assert gto_hf.check(llama, draft, full=True, prompts=prompt(2, 7), verbose=False).lossless.prompts == 2  # a tensor


def test_chains_and_refusals_are_named(capsys):
    bloom = FAMILIES["bloom"].build()
    report = gto_hf.check(bloom, OracleDraft.for_texts(bloom, prompt(1, 40)), verbose=False)
    assert report.ok and report.route == "chain" and "ALiBi" in str(report)
    mamba = FAMILIES["mamba"].build()
    report = gto_hf.check(mamba, OracleDraft.for_texts(bloom, prompt(1, 40)))
    assert not report.ok and report.route == "refused" and "recurrent state" in capsys.readouterr().out


def test_a_draft_of_another_target_does_not_pass(llama):
    other = tiny_draft(tiny_target("llama", vocab=80))
    report = gto_hf.check(llama, other, verbose=False)
    assert not report.ok and "80" in str(report)


def test_a_tree_that_leaks_between_siblings_is_found(llama, draft, monkeypatch):
    def everything(self):
        rows, size = self.parents.shape
        return torch.ones(rows, size, size, dtype=torch.bool).tril()

    assert lossless.tree_error(llama) < 1e-5
    monkeypatch.setattr(DraftTree, "ancestor_mask", everything)
    assert lossless.tree_error(llama) > 1e-3
    report = gto_hf.check(llama, draft, verbose=False)
    assert not report.ok and "siblings" in str(report)


def test_a_wrong_window_is_found(monkeypatch):
    from gto_hf.decoding import verifier

    model = FAMILIES["mistral"].build()
    assert lossless.tree_error(model) < 1e-5
    monkeypatch.setattr(verifier, "visible_by_kind", lambda kind, visible, queries, keys: visible)
    assert lossless.tree_error(model) > 1e-3


def test_the_first_divergence_and_its_gap_are_reported(llama):
    ids = prompt(1, 8)
    draft = OracleDraft.for_texts(llama, prompt(1, 60))
    real = llama.generate

    def off_by_one(*args, **kwargs):
        out = real(*args, **kwargs)
        if kwargs.get("assistant_model") is not None:
            out.sequences[0, 12] = (out.sequences[0, 12] + 1) % 64
        return out

    llama.generate = off_by_one
    report = gto_hf.verify_lossless(llama, draft, [ids[0]], max_new_tokens=10)
    (found,) = report.divergences
    with torch.no_grad():
        best = real(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None)
        top = llama(best[:, :12]).logits[0, -1].topk(2).values
    assert found.position == 12 and found.stock == best[0, 12] and found.drafted == (found.stock + 1) % 64
    assert found.gap == pytest.approx(float(top[0] - top[1]), rel=1e-3) and not found.near_tie
    assert not report.ok and "not a near-tie: a bug" in str(report)


def test_in_bfloat16_a_near_tie_is_no_bug_and_a_clear_gap_is():
    tie = lossless.Divergence(0, 5, 1, 2, gap=0.125, steps=1.0)
    clear = lossless.Divergence(0, 5, 1, 2, gap=4.0, steps=32.0)
    assert lossless.LosslessReport(torch.bfloat16, 1, 0, [tie], 2.0).ok
    assert not lossless.LosslessReport(torch.bfloat16, 1, 0, [clear], 2.0).ok
    assert not lossless.LosslessReport(torch.float32, 1, 0, [tie], 2.0).ok
