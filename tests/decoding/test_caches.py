# SPDX-License-Identifier: Apache-2.0
"""The caches a user passes or asks for, and how text goes on from them."""

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from gto_hf import CausalLMDraft, CostCurve, TreeConfig
from tests.decoding.calls import NEW, pair, run, tiny_draft_of
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft


def test_a_static_cache_gets_room_for_the_tree_and_the_text_is_stocks():
    _, stock, drafted = pair("llama", cache_implementation="static")
    assert torch.equal(stock.sequences, drafted.sequences)
    assert isinstance(drafted.cache, StaticCache) and drafted.statistics.mean_accepted > 0.8
    assert int(drafted.cache.get_seq_length()) == int(stock.cache.get_seq_length())


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_static_cache_with_windows_is_replaced_with_a_warning(name):
    with pytest.warns(UserWarning, match="DynamicCache"):
        _, stock, drafted = pair(name, cache_implementation="static")
    assert torch.equal(stock.sequences, drafted.sequences) and isinstance(drafted.cache, DynamicCache)


def test_the_users_static_cache_bounds_the_tree():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    stock = run(model, ids)
    draft = OracleDraft.for_texts(model, stock.sequences)
    for room in (0, 3, 40):
        cache = StaticCache(config=model.config, max_cache_len=12 + NEW - 1 + room)
        drafted = run(model, ids, cache=cache, assistant_model=draft)
        assert torch.equal(stock.sequences, drafted.sequences) and drafted.cache is cache
        assert drafted.statistics.accepted_tokens > 5
    with pytest.raises(ValueError, match="sliding-window"):
        sliding = FAMILIES["mistral"].build()
        run(
            sliding,
            ids,
            cache=StaticCache(config=sliding.config, max_cache_len=64),
            assistant_model=tiny_draft_of(sliding),
        )


def test_a_batch_in_the_users_static_cache_needs_one_column_more(monkeypatch):
    model = FAMILIES["llama"].build()
    ids = prompt(2, 12)
    stock = run(model, ids)
    draft = OracleDraft.for_texts(
        model, [stock.sequences[0], prompt(1, 40)[0]], miss=0.0
    )  # the second row lags behind
    drafted = run(model, ids, cache=StaticCache(config=model.config, max_cache_len=12 + NEW), assistant_model=draft)
    assert torch.equal(stock.sequences, drafted.sequences)
    monkeypatch.setattr(type(model), "__call__", lambda *a, **k: pytest.fail("a forward ran before the refusal"))
    with pytest.raises(ValueError, match="max_cache_len=32"):
        run(model, ids, cache=StaticCache(config=model.config, max_cache_len=12 + NEW - 1), assistant_model=draft)


def test_a_static_cache_whose_windows_would_not_fit_the_tree_is_replaced():
    for name in ("gemma3_text", "llama4_text"):
        ids = prompt(1, 3)
        _, stock, drafted = pair(name, ids, cache_implementation="static", max_new_tokens=4)
        assert torch.equal(stock.sequences, drafted.sequences)


@pytest.mark.parametrize("spare", [0, 1, 2, 5, 30])
def test_an_automatic_tree_keeps_within_the_users_static_cache(spare):
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    stock = run(model, ids)
    for costs in (None, CostCurve((0, 24), (1.0, 1.0), 0.0, 0.0)):
        draft = OracleDraft.for_texts(model, stock.sequences, tree=TreeConfig(5, 4, 24, auto=True))
        draft.costs = costs
        cache = StaticCache(config=model.config, max_cache_len=12 + NEW - 1 + spare)
        drafted = run(model, ids, cache=cache, assistant_model=draft)
        assert torch.equal(stock.sequences, drafted.sequences)


def test_the_cache_of_a_batch_holds_the_last_token_of_rows_that_ended_early():
    model = FAMILIES["llama"].build()
    ids = prompt(3, 8)
    free = run(model, ids).sequences
    eos = free[1, 12].item()
    draft = OracleDraft.for_texts(model, free)
    stock, drafted = run(model, ids, eos_token_id=eos), run(model, ids, eos_token_id=eos, assistant_model=draft)
    for mine, theirs in zip(drafted.cache.layers, stock.cache.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        torch.testing.assert_close(mine.keys[1, :, :13], theirs.keys[1, :, :13], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mine.values[1, :, :13], theirs.values[1, :, :13], atol=1e-5, rtol=1e-4)


def test_uneven_rows_and_much_padding():
    """Rows of very different acceptance leave holes in the draft's own columns, which are closed."""
    model = FAMILIES["llama"].build()
    ids = prompt(3, 30)
    ids[0, :26] = 0
    mask = (ids != 0).long()
    stock = run(model, ids, attention_mask=mask)
    for draft in (tiny_draft(model, vocab=60), CausalLMDraft(copy.deepcopy(model))):
        drafted = run(model, ids, attention_mask=mask, assistant_model=draft)
        assert torch.equal(stock.sequences, drafted.sequences)
    texts = [stock.sequences[0, 26:], *prompt(2, 60)]
    drafted = run(model, ids, attention_mask=mask, assistant_model=OracleDraft.for_texts(model, texts, miss=0.0))
    assert torch.equal(stock.sequences, drafted.sequences)


def test_a_batch_in_a_static_cache():
    ids = prompt(2, 12)
    _, stock, drafted = pair("llama", ids, cache_implementation="static")
    assert torch.equal(stock.sequences, drafted.sequences) and isinstance(drafted.cache, StaticCache)


def test_the_forward_is_compiled_where_transformers_would_compile():
    compiled = CompileConfig(backend="eager", fullgraph=False, mode=None)
    compiled._compile_all_devices = True
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    stock = run(model, ids)
    draft = OracleDraft.for_texts(model, stock.sequences)
    calls = []
    original = model.get_compiled_call
    model.get_compiled_call = lambda config: calls.append(config) or original(config)
    drafted = run(model, ids, assistant_model=draft, cache_implementation="static", compile_config=compiled)
    assert torch.equal(stock.sequences, drafted.sequences) and len(calls) == 1
    assert drafted.statistics.mean_accepted > 0.8


def test_a_quantized_or_foreign_cache_is_refused_before_any_forward(monkeypatch):
    model = FAMILIES["llama"].build()
    draft = tiny_draft_of(model)
    monkeypatch.setattr(type(model), "__call__", lambda *a, **k: pytest.fail("a forward ran before the refusal"))

    class OtherCache(DynamicCache):
        pass

    with pytest.raises(ValueError, match="OtherCache cannot"):
        run(model, prompt(1, 6), cache=OtherCache(config=model.config), assistant_model=draft)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "lfm2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_text_goes_on_from_the_users_cache(name):
    model = FAMILIES[name].build()
    ids = prompt(1, 12)
    whole = run(model, ids, max_new_tokens=NEW + 15).sequences
    draft = OracleDraft.for_texts(model, whole)
    cache = DynamicCache(config=model.config)
    first = run(model, ids, cache=cache, assistant_model=draft).sequences
    second = run(model, first, cache=cache, max_new_tokens=15, assistant_model=draft)
    assert torch.equal(second.sequences, whole)
    assert second.statistics.rounds < 15
    # a cache that trees have left behind serves stock generation, if it did not turn on recording
    cache = DynamicCache(config=model.config)
    first = run(model, ids, cache=cache, assistant_model=draft).sequences
    assert torch.equal(run(model, first, cache=cache, max_new_tokens=15).sequences, whole)


def test_a_batch_cannot_go_on_from_a_window_that_has_dropped_tokens():
    model = FAMILIES["mistral"].build()
    ids = prompt(2, 12)
    cache = DynamicCache(config=model.config)
    first = run(model, ids, cache=cache).sequences
    with pytest.raises(ValueError, match="one row at a time"):
        run(model, first, cache=cache, assistant_model=tiny_draft_of(model))
    # but it can from one that has not
    cache = DynamicCache(config=model.config)
    short = prompt(2, 4)
    first = run(model, short, cache=cache, max_new_tokens=3).sequences
    whole = run(model, short).sequences
    out = run(model, first, cache=cache, max_new_tokens=NEW - 3, assistant_model=OracleDraft.for_texts(model, whole))
    assert torch.equal(out.sequences, whole)
