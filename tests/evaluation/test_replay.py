# SPDX-License-Identifier: Apache-2.0
"""A replayed text has the rounds that decoding it has."""

import copy

import pytest
import torch

from gto_hf import TreeConfig
from gto_hf.evaluation.replay import Text, read_texts, replay


def decoded(target, draft, prompt, **kwargs):
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        return_dict_in_generate=True,
        **{"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **kwargs},
    )
    return output.sequences[0].tolist(), output.statistics


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tree", [None, TreeConfig(3, 2, 5), TreeConfig(5, 1, 5)])
def test_the_rounds_are_those_of_decoding(trained, sampled, tree):
    target, draft, prompts = trained
    draft = copy.deepcopy(draft)  # other tests share it
    if tree is not None:
        draft.tree = tree
    for seed, prompt in enumerate(prompts):
        torch.manual_seed(seed)
        kwargs = {"do_sample": True, "top_k": 0} if sampled else {}
        tokens, statistics = decoded(target, draft, prompt[None], **kwargs)
        text = Text(tokens, len(prompt))
        (found,) = replay(draft, [text], read_texts(target, draft, [text]))
        mine = found.statistics
        assert mine.emitted_tokens == statistics.emitted_tokens == 40
        # Trees shrink in the last rounds before a limit; nothing else may differ.
        assert abs(mine.rounds - statistics.rounds) <= 1
        assert mine.accepted_tokens + mine.bonus_tokens == 39
        assert len(found.accepted) == 39
        assert sum(mine.accepted_histogram) == mine.rounds


def test_a_text_that_ends_in_the_middle_of_a_round_has_no_bonus_token(trained):
    target, draft, prompts = trained
    tokens, _ = decoded(target, draft, prompts[:1])
    start = prompts.shape[1]
    (whole,) = replay(draft, [Text(tokens, start)], read_texts(target, draft, [Text(tokens, start)]))
    first = whole.accepted[0]
    assert first > 0
    cut = Text(tokens[: start + 1 + first], start)  # the prefill's token and what the first round accepts
    (short,) = replay(draft, [cut], read_texts(target, draft, [cut]))
    assert short.statistics.rounds == 1 and short.statistics.bonus_tokens == 0
    assert short.statistics.emitted_tokens == 1 + first


def test_a_text_of_one_new_token_has_no_round(trained):
    target, draft, prompts = trained
    text = Text([*prompts[0].tolist(), 5], prompts.shape[1])
    (found,) = replay(draft, [text], read_texts(target, draft, [text]))
    assert found.statistics.rounds == 0 and found.accepted == []


@pytest.mark.parametrize("prompt", [0, 3, 4])
def test_texts_without_prompt_or_answer_are_refused(prompt):
    with pytest.raises(ValueError, match=f"{prompt} prompt tokens of 3"):
        Text([1, 2, 3], prompt)
