# SPDX-License-Identifier: Apache-2.0
"""The memory of a token loss, measured: what PyTorch allocates and frees between the target's forward and the gradient."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gto_hf.gto import read_target, reading, token_loss
from tests.tiny import tiny_draft, tiny_target


VOCAB, KEPT, ROWS, LENGTH, STEPS = 8192, 4096, 2, 128, 2
WHOLE = ROWS * LENGTH * VOCAB * 4  # bytes of `[batch, length, vocabulary]` in float32


def peak(run):
    """Most bytes that were allocated at a time within `run()`, beyond what was there before; and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = run()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def test_the_measure_sees_a_tensor_that_is_gone_again():
    most, _ = peak(lambda: float(torch.ones(1000, 1000).sum()))
    assert 4_000_000 <= most < 4_100_000


def test_no_logits_of_the_whole_vocabulary_exist_for_all_positions(monkeypatch):
    target = tiny_target(vocab=VOCAB)
    draft = tiny_draft(target, vocab=KEPT)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    mask, roots = torch.ones_like(ids), torch.arange(LENGTH - STEPS).expand(ROWS, -1)
    supervised = torch.ones(*roots.shape, STEPS, dtype=torch.bool)
    start = torch.randn(STEPS, *roots.shape, draft.config.hidden_size)

    def loss(elements):
        monkeypatch.setattr(reading, "WIDE_ELEMENTS", elements)
        features = [each.clone().requires_grad_() for each in start]
        layers = list(draft.config.feature_layers)
        read = read_target(target, ids, mask, layers, 0, LENGTH, use_cache=False)
        draft.zero_grad()
        found = token_loss(draft, features, read.readout, roots, supervised, elements=elements)
        found.loss.backward()
        return found.loss.detach(), [each.grad for each in features], draft.lm_head.weight.grad.clone()

    at_once, (value, gradients, head) = peak(lambda: loss(2**40))
    in_parts, (same_value, same_gradients, same_head) = peak(lambda: loss(2**16))
    assert at_once > WHOLE and in_parts < 0.75 * WHOLE, (at_once / WHOLE, in_parts / WHOLE)
    assert float(same_value) == pytest.approx(float(value), rel=1e-6)
    torch.testing.assert_close(same_gradients, gradients, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(same_head, head, atol=1e-5, rtol=1e-5)
