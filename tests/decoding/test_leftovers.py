# SPDX-License-Identifier: Apache-2.0
"""Nothing is left behind, whatever interrupts a call; and the ends of position tables."""

import threading

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import DynamicSlidingWindowLayer

from gto_hf import CausalLMDraft, TreeConfig, record_rounds
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_target


def run(model, ids, **kwargs):
    defaults = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    return model.generate(ids, **{**defaults, "pad_token_id": 0, **kwargs})


class _Fails(LogitsProcessor):
    def __init__(self, at):
        self.left = at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise KeyError("from the user's processor")
        return scores


@pytest.mark.parametrize("name", ["llama", "mistral", "lfm2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exception_in_the_users_code_leaves_a_cache_to_go_on_from(name):
    model = FAMILIES[name].build()
    ids = prompt(1, 12)
    whole = run(model, ids)
    cache = DynamicCache(config=model.config)
    draft = OracleDraft.for_texts(model, whole)
    with pytest.raises(KeyError, match="processor"):
        run(model, ids, assistant_model=draft, cache=cache, logits_processor=[_Fails(10)])
    known = cache.get_seq_length()
    assert 12 <= known < 22
    assert torch.equal(run(model, whole[:, : known + 1], cache=cache, max_new_tokens=32 - known - 1), whole)


def test_windows_evict_again_after_a_call_and_in_a_batch_they_come_back():
    model = FAMILIES["mistral"].build()
    for rows in (1, 2):
        ids = prompt(rows, 12)
        whole = run(model, ids, max_new_tokens=30)
        stock, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
        first = run(model, ids, cache=stock, max_new_tokens=15)
        assert torch.equal(
            run(model, ids, cache=cache, assistant_model=OracleDraft.for_texts(model, whole), max_new_tokens=15), first
        )
        for mine, theirs in zip(cache.layers, stock.layers, strict=True):
            assert type(mine) is type(theirs) is DynamicSlidingWindowLayer and not mine.record_past
            assert mine.cumulative_length == theirs.cumulative_length
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-4)
        assert torch.equal(run(model, first, cache=cache, max_new_tokens=15), whole)
        assert cache.layers[0].keys.shape[-2] == 7


@pytest.mark.parametrize("calls", [1, 9])
def test_windows_come_back_after_an_exception(calls):
    model = FAMILIES["mistral"].build()
    for rows in (1, 2):
        ids = prompt(rows, 4)
        whole = run(model, ids)
        cache = DynamicCache(config=model.config)
        draft = OracleDraft.for_texts(model, whole)
        with pytest.raises(KeyError):
            run(model, ids, assistant_model=draft, cache=cache, logits_processor=[_Fails(calls)])
        assert all(type(x) is DynamicSlidingWindowLayer and not x.record_past for x in cache.layers)
        if rows == 1:
            known = cache.get_seq_length()
            assert torch.equal(run(model, whole[:, : known + 1], cache=cache, max_new_tokens=24 - known - 1), whole)


def test_threads_share_a_target_and_a_draft():
    model = tiny_target("llama")
    draft = tiny_draft(model)
    prompts = [prompt(1, 5 + 9 * i, seed=i) for i in range(4)]
    expected = [run(model, ids) for ids in prompts]
    failures = []

    def work(index):
        try:
            for _ in range(6):
                with record_rounds(trees=False, seconds=True):
                    assert torch.equal(run(model, prompts[index], assistant_model=draft), expected[index])
        except BaseException as error:
            failures.append(error)

    interval = __import__("sys").getswitchinterval()
    try:
        __import__("sys").setswitchinterval(1e-4)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        __import__("sys").setswitchinterval(interval)
    assert not failures
    assert not {"forward", "head", "fuse"} & set(draft.__dict__)


def test_dropout_in_a_draft_draws_nothing_from_the_generator_and_its_mode_is_kept():
    model = FAMILIES["llama"].build()
    small = FAMILIES["llama"].build()
    small.config.attention_dropout = 0.3
    for layer in small.model.layers:
        layer.self_attn.attention_dropout = 0.3
    draft = CausalLMDraft(small).train()
    draft.model.lm_head.eval()
    ids = prompt(1, 12)
    texts = []
    for kwargs in ({}, {"assistant_model": draft}):
        torch.manual_seed(0)
        texts.append(run(model, ids, do_sample=True, **kwargs))
    assert torch.equal(*texts)
    assert draft.training and small.model.training and not small.lm_head.training


@pytest.mark.parametrize("length", [505, 509, 511])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_automatic_trees_end_with_the_position_table(name, length):
    model = FAMILIES[name].build()
    ids = prompt(1, length)
    draft = tiny_draft(model, vocab=60)
    draft.tree = "auto"
    new = min(513 - length, 4)
    assert torch.equal(run(model, ids, assistant_model=draft, max_new_tokens=new), run(model, ids, max_new_tokens=new))


def test_rows_that_end_on_the_last_position_do_not_run_off_the_table():
    model = FAMILIES["gpt2"].build()
    ids = prompt(2, 500)
    stock = run(model, ids, max_new_tokens=13)
    texts = [stock[0], prompt(1, 520, seed=9)[0]]  # the first row is far ahead
    for tree in (TreeConfig(4, 3, 12), TreeConfig(4, 3, 12, auto=True)):
        draft = OracleDraft.for_texts(model, texts, miss=0.0, tree=tree)
        with pytest.warns(UserWarning, match="512"):
            assert torch.equal(run(model, ids, assistant_model=draft, max_new_tokens=13), stock)


def test_a_language_model_with_a_short_position_table_drafts_up_to_its_end():
    model = FAMILIES["llama"].build()
    small = tiny_target("gpt2")
    small.config.n_positions = 32
    small.transformer.wpe.weight.data = small.transformer.wpe.weight.data[:32]
    small.transformer.wpe.num_embeddings = 32
    draft = CausalLMDraft(small, tree=TreeConfig(4, 3, 12))
    for length in (12, 40):
        ids = prompt(1, length)
        for auto in (False, True):
            draft.tree = TreeConfig(4, 3, 12, auto=auto)
            out = run(model, ids, assistant_model=draft, max_new_tokens=30, return_dict_in_generate=True)
            assert torch.equal(out.sequences, run(model, ids, max_new_tokens=30))
            assert (out.statistics.draft_forwards > 0) == (length == 12)


def test_virtual_tokens_are_refused_before_any_forward():
    model = tiny_target("llama")
    draft = tiny_draft(model)
    wrapped = get_peft_model(
        model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, tokenizer_name_or_path=None)
    )
    with pytest.raises(ValueError, match="virtual tokens"):
        wrapped.generate(input_ids=prompt(1, 8), assistant_model=draft, max_new_tokens=4)


def test_another_way_of_decoding_is_refused_and_not_ignored():
    model = tiny_target("llama")
    with pytest.raises(ValueError, match="dola_layers"):
        run(model, prompt(1, 8), assistant_model=tiny_draft(model), dola_layers="low")
