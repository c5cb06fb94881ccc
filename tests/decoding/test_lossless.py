# SPDX-License-Identifier: Apache-2.0
"""The text of `generate(assistant_model=draft)` is the text of stock `generate`: token for token, and in law."""

import itertools

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessor

from gto_hf import TreeConfig, TreeDecoder
from tests.tiny import tiny_draft, tiny_target


def both(target, draft, prompt, **kwargs):
    """(stock output, tree output) as dicts, from the same seed."""
    common = {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True, **kwargs}
    torch.manual_seed(3)
    stock = target.generate(prompt, **common)
    torch.manual_seed(3)
    return stock, target.generate(prompt, assistant_model=draft, **common)


def test_greedy_text_equals_stock_with_a_trained_draft_that_accepts(trained):
    target, draft, prompts = trained
    accepted = rounds = 0
    for prompt in prompts:
        stock, tree = both(target, draft, prompt[None], max_new_tokens=50, do_sample=False, eos_token_id=None)
        assert torch.equal(stock.sequences, tree.sequences)
        accepted += tree.statistics.accepted_tokens
        rounds += tree.statistics.rounds
    assert accepted / rounds >= 1.5  # otherwise equality would be cheap


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2"])
def test_greedy_text_equals_stock_with_a_random_draft(arch, attention):
    target = tiny_target(arch)
    target.set_attn_implementation(attention)
    draft = tiny_draft(target)
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = torch.randint(3, 64, (1, 5 + seed))
        stock, tree = both(target, draft, prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert torch.equal(stock.sequences, tree.sequences)


def test_greedy_text_equals_stock_in_eager_attention_with_a_trained_draft(trained):
    target, draft, prompts = trained
    target.set_attn_implementation("eager")
    try:
        stock, tree = both(target, draft, prompts[:1], max_new_tokens=40, do_sample=False, eos_token_id=None)
    finally:
        target.set_attn_implementation("sdpa")
    assert torch.equal(stock.sequences, tree.sequences)
    assert tree.statistics.mean_accepted > 1


def test_sampled_text_equals_stock_with_the_same_seed(trained):
    target, draft, prompts = trained
    accepted = 0
    for i, kwargs in enumerate(
        [
            {"temperature": 1.0},
            {"temperature": 0.3},
            {"temperature": 0.7, "top_p": 0.9},
            {"top_k": 3},
            {"min_p": 0.05, "temperature": 2.0},
        ]
    ):
        prompt = prompts[i : i + 1]
        stock, tree = both(target, draft, prompt, max_new_tokens=40, do_sample=True, eos_token_id=None, **kwargs)
        assert torch.equal(stock.sequences, tree.sequences), kwargs
        accepted += tree.statistics.accepted_tokens
    assert accepted > 20


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 20])
def test_length_is_exact_for_every_limit(trained, count):
    target, draft, prompts = trained
    prompt = prompts[:1]
    stock, tree = both(target, draft, prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert torch.equal(stock.sequences, tree.sequences)
    _, tree = both(target, draft, prompt, max_length=prompt.shape[1] + count, do_sample=False, eos_token_id=None)
    assert tree.sequences.shape[1] == prompt.shape[1] + count


def test_end_of_sequence_inside_an_accepted_path_stops_there(trained):
    target, draft, prompts = trained
    stock, _ = both(target, draft, prompts[:1], max_new_tokens=40, do_sample=False, eos_token_id=None)
    text = stock.sequences[0, prompts.shape[1] :].tolist()
    for eos in (text[3], [text[7], text[11]], text[20]):
        a, b = both(target, draft, prompts[:1], max_new_tokens=40, do_sample=False, eos_token_id=eos)
        assert torch.equal(a.sequences, b.sequences)
        # The cache holds exactly what stock generation leaves in it.
        assert a.cache.get_seq_length() == b.cache.get_seq_length() == b.sequences.shape[1] - 1


def test_cache_rows_after_generation_equal_stock(trained):
    target, draft, prompts = trained
    a, b = both(target, draft, prompts[:1], max_new_tokens=30, do_sample=False, eos_token_id=None)
    for mine, theirs in zip(b.cache.layers, a.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=1e-4)


def test_scores_and_logits_equal_stock(trained):
    target, draft, prompts = trained
    kwargs = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.2, "temperature": 0.5}
    a, b = both(target, draft, prompts[:1], max_new_tokens=25, do_sample=True, eos_token_id=None, **kwargs)
    assert len(a.scores) == len(b.scores) == len(b.logits) == 25
    torch.testing.assert_close(torch.cat(b.scores), torch.cat(a.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(b.logits), torch.cat(a.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 20, "eos_token_id": 5},
        {"bad_words_ids": [[7], [9, 11]]},
        {"suppress_tokens": [8, 12]},
        {"sequence_bias": {(10,): 3.0}},
        {"forced_eos_token_id": 2},
        {"prefix_allowed_tokens_fn": lambda _, ids: list(range(3, 64, 2 if len(ids) % 2 else 3))},
    ],
)
def test_logits_processors_see_the_exact_prefix(trained, kwargs):
    target, draft, prompts = trained
    for prompt in prompts[:2]:
        a, b = both(
            target, draft, prompt[None], **{"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **kwargs}
        )
        assert torch.equal(a.sequences, b.sequences)


class _Recorder(LogitsProcessor):
    """Stateful: counts its calls and bans a token that depends on the count."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores[:, 3 + len(self.seen) % 5] = -torch.inf
        return scores


def test_a_stateful_processor_is_called_once_per_token_on_the_stock_prefixes(trained):
    target, draft, prompts = trained
    first, second = _Recorder(), _Recorder()
    kwargs = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    a = target.generate(prompts[:1], attention_mask=torch.ones_like(prompts[:1]), logits_processor=[first], **kwargs)
    b = target.generate(
        prompts[:1],
        attention_mask=torch.ones_like(prompts[:1]),
        logits_processor=[second],
        assistant_model=draft,
        **kwargs,
    )
    assert torch.equal(a, b)
    assert first.seen == second.seen


@pytest.mark.parametrize("rows, draws", [(1, 800), (100, 6000)])
def test_sampling_follows_the_exact_joint_law(rows, draws):
    """Chi-square over all texts of three tokens: a tree with every token of a tiny vocabulary in it, alone and in batches."""
    target = tiny_target("llama", vocab=6, sharpness=4.0)
    draft = tiny_draft(target, vocab=6, tree=TreeConfig(depth=2, top_k=3, total_tokens=9))
    prompt = torch.tensor([[3, 4, 5]])
    law = {}
    for text in itertools.product(range(6), repeat=3):
        ids = torch.cat([prompt, torch.tensor([text])], 1)
        with torch.no_grad():
            log_probs = target(ids).logits[0, 2:-1].log_softmax(-1)
        law[text] = log_probs.gather(1, torch.tensor(text)[:, None]).sum().exp().item()
    assert abs(sum(law.values()) - 1) < 1e-4
    counts = dict.fromkeys(law, 0)
    accepted = 0
    for seed in range(draws // rows):
        torch.manual_seed(seed)
        out = target.generate(
            prompt.expand(rows, -1),
            attention_mask=torch.ones(rows, 3),
            assistant_model=draft,
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        for row in out.sequences[:, 3:].tolist():
            counts[tuple(row)] += 1
        accepted += out.statistics.accepted_tokens
    assert accepted > draws / 2  # the tree was really used
    # Cells of small expectation are pooled, as the test asks for.
    large = [t for t in law if law[t] * draws >= 5]
    observed = [counts[t] for t in large] + [draws - sum(counts[t] for t in large)]
    expected = [law[t] * draws for t in large]
    expected.append(draws - sum(expected))
    if expected[-1] < 1:
        observed, expected = observed[:-1], [e * sum(observed[:-1]) / sum(expected[:-1]) for e in expected[:-1]]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_the_unpatched_route_gives_the_same_text(trained):
    target, draft, prompts = trained
    kwargs = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": None}
    mask = torch.ones_like(prompts[:1])
    torch.manual_seed(0)
    stock = target.generate(prompts[:1], attention_mask=mask, **kwargs)
    torch.manual_seed(0)
    tree = target.generate(prompts[:1], attention_mask=mask, custom_generate=TreeDecoder(draft), **kwargs)
    assert torch.equal(stock, tree)


def test_bfloat16_text_differs_only_at_near_ties(trained):
    target, draft, prompts = trained
    target, draft = target.to(torch.bfloat16), draft.to(torch.bfloat16)
    try:
        for prompt in prompts:
            stock, tree = both(target, draft, prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=None)
            differ = (stock.sequences != tree.sequences)[0].nonzero()
            if len(differ):
                first = int(differ[0])
                with torch.no_grad():
                    top = target(stock.sequences[:, :first]).logits[0, -1].float().topk(2).values
                # one bfloat16 step at this magnitude, twice for two roundings
                assert top[0] - top[1] <= 2 * top[0].abs() * 2**-7
    finally:
        target.float(), draft.float()
