# SPDX-License-Identifier: Apache-2.0
"""Logits made from last hidden states, a few positions at a time, are the target's own."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from gto_hf.drafts import EagleDraft
from gto_hf.gto import read_target
from gto_hf.target import find_head
from tests.families import FAMILIES
from tests.tiny import tiny_target


def prepared(name):
    target = FAMILIES[name].build()
    if name == "granite":
        target.config.logits_scaling = target.logits_scaling = 4.0
    if name == "cohere2":
        target.logit_scale = target.config.logit_scale = 0.5
    return target


@pytest.mark.parametrize(
    "name, understood",
    [
        *[
            (name, True)
            for name in ("llama", "gpt2", "falcon", "gemma2", "cohere2", "granite", "gemma3", "llava", "bloom")
        ],
        ("gemma3n_text", False),
    ],
)
def test_logits_are_the_targets(name, understood):
    target = prepared(name)
    ids, mask = torch.randint(3, 60, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[0, :3] = 0
    reading = read_target(target, ids, mask, [1, 2], 4, 11, use_cache=False)
    readout = reading.readout
    assert (readout.head is not None) == understood
    assert readout.first == 4 and readout.last == 11
    row, slot = torch.tensor([0, 0, 1]), torch.tensor([4, 10, 7])
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = target(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits[row, slot]
    torch.testing.assert_close(readout.logits(row, slot), logits, atol=1e-5, rtol=1e-5)
    kept = torch.tensor([5, 9, 40])
    some, normaliser, top = readout.kept(row, slot, kept)
    torch.testing.assert_close(some, logits[:, kept], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normaliser, logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(top, logits.argmax(-1))
    if understood:
        torch.testing.assert_close(readout.head.rows(readout.states[row, slot - 4], kept), some, atol=1e-5, rtol=1e-5)


def test_a_head_that_does_something_unknown_is_found_out():
    target = tiny_target()
    head = target.lm_head
    target.lm_head.register_forward_hook(lambda module, args, output: output * 1.01)
    assert (
        find_head(target, lambda: probe(target)) is not None
    )  # the hook belongs to the module, so it is called as well
    other = tiny_target()
    forward = other.forward
    other.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))
    assert find_head(other, lambda: probe(other)) is None
    assert head is target.lm_head


def scaled(output):
    output.logits = output.logits * 1.01
    return output


def probe(target):
    output = target(torch.randint(3, 60, (1, 8)), output_hidden_states=True)
    return output.hidden_states[-1][0], output.logits[0]


def test_a_target_that_answers_nan_is_asked_again():
    target = tiny_target()
    weight = target.lm_head.weight.data.clone()
    target.lm_head.weight.data.fill_(float("nan"))
    assert find_head(target, lambda: probe(target)) is None
    target.lm_head.weight.data.copy_(weight)
    assert find_head(target, lambda: probe(target)) is not None


HEADS = {
    "adapter": lambda target: inject_adapter_in_model(
        LoraConfig(target_modules=["lm_head"], init_lora_weights=False), target
    ),
    "another head": lambda target: target.set_output_embeddings(torch.nn.Linear(32, 64, bias=False)),
    "resized": lambda target: target.resize_token_embeddings(60, mean_resizing=False),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_was_replaced_is_found_again(name):
    target = tiny_target()
    draft = EagleDraft.from_target(target)  # compares the head that is there now
    HEADS[name](target)
    ids = torch.arange(3, 13)[None]
    reading = read_target(target, ids, torch.ones_like(ids), [8], 0, 10, use_cache=False)
    with torch.no_grad():
        logits = target(ids).logits
        made = reading.readout.logits(torch.zeros(10, dtype=torch.long), torch.arange(10))
        torch.testing.assert_close(made, logits[0])
        if name != "resized":
            torch.testing.assert_close(draft.attach(target).head(reading.sequences.features), logits)
