# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds: what they hold is what happened, and recording changes nothing."""

import torch

from gto_hf import TreeConfig, misalignment, record_rounds
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft


def generate(model, ids, draft, **kwargs):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        **{"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True, **kwargs},
    )


def test_rounds_replay_the_text(trained):
    target, draft, prompts = trained
    ids = prompts[:2]
    plain = generate(target, ids, draft)
    with record_rounds() as recorder:
        out = generate(target, ids, draft)
    assert torch.equal(out.sequences, plain.sequences) and plain.trace is None
    assert out.trace == recorder.rounds and len(out.trace) == out.statistics.rounds
    for row in range(2):
        rounds = [r for r in out.trace if r.row == row]
        text = out.sequences[row, : rounds[0].length].tolist()
        for r in rounds:
            assert r.length == len(text) and r.tree.tokens[0, 0] == text[-1]
            assert r.path[0] == 0 and len(r.path) == len(r.emitted)
            drafted = r.tree.tokens[0, r.path[1:]].tolist()
            assert drafted == r.emitted[: len(drafted)]
            text += r.emitted
        assert text == out.sequences[row].tolist()


def test_probabilities_are_those_of_a_plain_forward(trained):
    target, draft, prompts = trained
    with record_rounds():
        out = generate(target, prompts[:1], draft)
    some = out.trace[1]
    prefix = out.sequences[:, : some.length]
    tree = some.tree
    for column in range(1, tree.tokens.shape[1]):
        path, node = [], column
        while node:
            path.insert(0, int(tree.tokens[0, node]))
            node = int(tree.parents[0, node])
        with torch.no_grad():
            logits = target(torch.cat([prefix, torch.tensor([path])], 1)).logits[0, -2].log_softmax(-1)
        assert abs(float(logits[path[-1]] - some.target_log_probs[column])) < 1e-3
    assert some.target_log_probs[0] == 0


def test_the_greedy_path_is_the_drafts_own_before_pruning(trained):
    target, draft, prompts = trained
    before = draft.tree
    try:
        draft.tree = TreeConfig(4, 1, 4)  # a chain is the greedy path
        with record_rounds():
            chain = generate(target, prompts[:1], draft)
        draft.tree = TreeConfig(4, 5, 6)
        with record_rounds():
            tree = generate(target, prompts[:1], draft)
    finally:
        draft.tree = before
    for r in chain.trace[:-2]:  # the last ones are cut by the length limit
        assert r.greedy == r.tree.tokens[0, 1:].tolist() and r.greedy_kept == len(r.greedy)
    assert any(r.greedy_kept < len(r.greedy) for r in tree.trace)
    assert len(tree.trace[0].greedy) == len(tree.trace[0].greedy_log_probs) == 4
    figures = misalignment(tree.trace)
    assert figures.rounds == len(tree.trace) and 0 < figures.pruned <= 1


def test_seconds_add_up_and_host_time_is_the_rest(trained):
    target, draft, prompts = trained
    with record_rounds(trees=False, seconds=True) as recorder:
        out = generate(target, prompts[:1], draft)
    assert len(recorder.times) == out.statistics.rounds and not recorder.rounds and out.trace is None
    for t in recorder.times:
        assert min(t.target, t.processors, t.host) > 0 and (t.draft > 0) == (t.nodes > 0)
        assert abs(t.target + t.draft + t.processors + t.host - t.total) < 1e-9
    assert sum(t.emitted for t in recorder.times) == out.statistics.emitted_tokens - 1
    assert sum(t.nodes for t in recorder.times) == out.statistics.drafted_tokens


def test_recording_ends_with_its_context_and_counts_no_forwards():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 8)
    text = generate(model, ids, None).sequences
    draft = OracleDraft.for_texts(model, text)
    with record_rounds():
        recorded = generate(model, ids, draft)
    again = generate(model, ids, draft)
    assert recorded.trace and again.trace is None
    assert recorded.statistics == again.statistics
