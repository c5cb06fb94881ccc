# SPDX-License-Identifier: Apache-2.0
"""What `generate` can be asked for beside the text: states, caches, embedding prompts, chunks, batches, backends."""

import copy
import warnings

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache, StoppingCriteria, pipeline
from transformers.generation.streamers import BaseStreamer

from gto_hf import CausalLMDraft, CostCurve, TreeConfig, TreeDecoder
from gto_hf.target import text_config
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_tokenizer


NEW = 20


def run(model, ids, **kwargs):
    defaults = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    return model.generate(ids, **{**defaults, **kwargs})


def pair(name, ids=None, *, attention=None, **kwargs):
    """(model, stock output, output with a draft that knows the text)."""
    ids = prompt(1, 12) if ids is None else ids
    model = FAMILIES[name].build(attention=attention or FAMILIES[name].attention[0])
    stock = run(model, ids, **copy.copy(kwargs))
    draft = OracleDraft.for_texts(model, stock.sequences)
    return model, stock, run(model, ids, assistant_model=draft, **copy.copy(kwargs))


def same_states(mine, stock, atol=1e-4):
    assert len(mine) == len(stock)
    for a, b in zip(mine, stock, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x, y, atol=atol, rtol=1e-4)


# ---------------------------------------------------------------- states
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "gpt_oss", "gemma3n_text", "deepseek_v3", "llama4_text"]
)
def test_hidden_states_and_attentions_equal_stock(name):
    kwargs = {"output_hidden_states": True, "output_attentions": True}
    _, stock, drafted = pair(name, attention="eager", **kwargs)
    assert torch.equal(stock.sequences, drafted.sequences) and drafted.statistics.mean_accepted > 0.8
    same_states(drafted.hidden_states, stock.hidden_states, atol=1e-3)
    same_states(drafted.attentions, stock.attentions)


def test_states_scores_and_logits_of_a_padded_batch_equal_stock():
    ids = prompt(3, 12)
    ids[1, :5] = 0
    mask = (ids != 0).long()
    model = FAMILIES["llama"].build(attention="eager")
    kwargs = dict.fromkeys(("output_hidden_states", "output_attentions", "output_scores", "output_logits"), True) | {
        "attention_mask": mask,
        "repetition_penalty": 1.1,
    }
    stock = run(model, ids, **kwargs)
    texts = [row[m.argmax() :] for row, m in zip(stock.sequences, mask, strict=True)]
    drafted = run(model, ids, assistant_model=OracleDraft.for_texts(model, texts), **kwargs)
    assert torch.equal(stock.sequences, drafted.sequences)
    for mine, theirs in zip(drafted.hidden_states[1:], stock.hidden_states[1:], strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    same_states(drafted.attentions[1:], stock.attentions[1:])
    for field in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(getattr(drafted, field)), torch.stack(getattr(stock, field)), atol=1e-3, rtol=1e-3
        )


def test_past_its_end_a_row_has_the_padding_token_with_probability_one():
    ids = prompt(2, 8)
    model = FAMILIES["llama"].build()
    free = run(model, ids).sequences
    eos = free[0, 11].item()
    stock = run(model, ids, eos_token_id=eos, output_scores=True)
    draft = OracleDraft.for_texts(model, free)
    drafted = run(model, ids, assistant_model=draft, eos_token_id=eos, output_scores=True, output_hidden_states=True)
    assert torch.equal(stock.sequences, drafted.sequences)
    assert (drafted.sequences[0, 12:] == 0).all() and drafted.sequences.shape[1] > 13
    assert len(drafted.scores) == len(drafted.hidden_states) == drafted.sequences.shape[1] - 8
    assert drafted.scores[-1][0].softmax(-1)[0] == 1
    transition = model.compute_transition_scores(drafted.sequences, drafted.scores, normalize_logits=True)
    assert (transition[0, 4:] == 0).all()


# ---------------------------------------------------------------- caches
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


def tiny_draft_of(model):
    return OracleDraft.for_texts(model, prompt(1, 30))


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


# ---------------------------------------------------------------- prompts
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_embedding_prompts_give_stocks_text_and_the_draft_reads_them(name):
    model = FAMILIES[name].build()
    ids = prompt(1, 12)
    embeds = model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    stock = model.generate(inputs_embeds=embeds, **kwargs)
    draft = tiny_draft(model, vocab=60)
    with_ids = run(model, ids, assistant_model=draft)
    seen = model.generate(inputs_embeds=embeds, assistant_model=draft, return_dict_in_generate=True, **kwargs)
    assert torch.equal(seen.sequences, stock) and torch.equal(with_ids.sequences[:, 12:], stock)
    # the draft saw the same prompt either way, so it drafted the same trees
    assert seen.statistics == with_ids.statistics
    beside = model.generate(ids, inputs_embeds=embeds, assistant_model=draft, **kwargs)
    assert torch.equal(beside[:, 12:], stock)


def test_embedding_prompts_for_drafts_that_cannot_read_them():
    model = FAMILIES["llama"].build()
    embeds = model.get_input_embeddings()(prompt(2, 12))
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    stock = model.generate(inputs_embeds=embeds, **kwargs)
    for draft in (CausalLMDraft(copy.deepcopy(model)), tiny_draft_of(model)):
        assert torch.equal(model.generate(inputs_embeds=embeds, assistant_model=draft, **kwargs), stock)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_chunked_prefill_loses_no_features(name):
    model = FAMILIES[name].build()
    ids = prompt(1, 23)
    draft = tiny_draft(model, vocab=60)
    whole = run(model, ids, assistant_model=draft)
    chunked = run(model, ids, assistant_model=draft, prefill_chunk_size=5)
    assert torch.equal(whole.sequences, chunked.sequences)
    assert whole.statistics == chunked.statistics  # the draft read the same prompt


# ---------------------------------------------------------------- batches
def test_rows_that_stop_early_are_padded_as_stock_does():
    model = FAMILIES["llama"].build()
    ids = prompt(4, 8)
    free = run(model, ids).sequences
    for eos in ([free[0, 9].item()], [free[1, 12].item(), free[2, 15].item()]):
        stock = run(model, ids, eos_token_id=eos)
        drafted = run(model, ids, eos_token_id=eos, assistant_model=OracleDraft.for_texts(model, free))
        assert torch.equal(stock.sequences, drafted.sequences)
        assert stock.cache.get_seq_length() == drafted.cache.get_seq_length()


class _StopAt(StoppingCriteria):
    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_without_an_eos_rows_that_stop_write_on_until_all_have_stopped_as_stock_does():
    model = FAMILIES["llama"].build()
    ids = prompt(3, 8)
    free = run(model, ids).sequences
    stops = [_StopAt([free[0, 10].item(), free[1, 14].item(), free[2, 19].item()])]
    stock = run(model, ids, stopping_criteria=stops)
    drafted = run(model, ids, stopping_criteria=stops, assistant_model=OracleDraft.for_texts(model, free))
    assert torch.equal(stock.sequences, drafted.sequences)
    assert stock.cache.get_seq_length() == drafted.cache.get_seq_length()


def test_a_streamer_gets_the_columns_of_a_batch_as_stock_gives_them():
    class Columns(BaseStreamer):
        def __init__(self):
            self.seen, self.ends = [], 0

        def put(self, value):
            self.seen.append(value.tolist())

        def end(self):
            self.ends += 1

    model = FAMILIES["llama"].build()
    ids = prompt(3, 8)
    free = run(model, ids).sequences
    eos = free[1, 13].item()
    stock, drafted = Columns(), Columns()
    run(model, ids, streamer=stock, eos_token_id=eos)
    run(model, ids, streamer=drafted, eos_token_id=eos, assistant_model=OracleDraft.for_texts(model, free))
    assert drafted.seen == stock.seen and drafted.ends == 1


def test_processors_that_know_rows_by_number_see_their_own():
    model = FAMILIES["llama"].build()
    ids = prompt(3, 8)

    def allowed(row, sentence):
        return list(range(3 + row, 64, 2 + row)) if len(sentence) % 2 else list(range(3, 64, 3))

    for kwargs in (
        {"prefix_allowed_tokens_fn": allowed},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ):
        stock = run(model, ids, **kwargs)
        drafted = run(model, ids, assistant_model=OracleDraft.for_texts(model, stock.sequences), **kwargs)
        assert torch.equal(stock.sequences, drafted.sequences), kwargs
        assert drafted.statistics.accepted_tokens > NEW


def test_guidance_serves_one_row_and_refuses_a_batch():
    model = FAMILIES["llama"].build()
    _, stock, drafted = pair("llama", guidance_scale=1.5)
    assert torch.equal(stock.sequences, drafted.sequences)
    with pytest.raises(ValueError, match="guidance_scale"):
        run(model, prompt(2, 8), guidance_scale=1.5, assistant_model=tiny_draft_of(model))


def test_several_return_sequences_are_a_batch():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 8)
    out = run(model, ids, num_return_sequences=3, do_sample=True, assistant_model=tiny_draft_of(model))
    assert out.sequences.shape == (3, 8 + NEW) and len({tuple(r) for r in out.sequences.tolist()}) == 3
    stock = run(model, ids, num_return_sequences=3, do_sample=True)
    assert stock.sequences.shape == out.sequences.shape


def test_a_chain_target_refuses_a_batch_with_the_reason():
    model = FAMILIES["lfm2"].build()
    with pytest.raises(ValueError, match="convolution layers.*Loop over the rows"):
        run(model, prompt(2, 8), assistant_model=tiny_draft_of(model))


def test_a_chain_target_warns_once():
    model = FAMILIES["bloom"].build()
    draft = tiny_draft_of(model)
    with pytest.warns(UserWarning, match="ALiBi.*chain"):
        run(model, prompt(1, 8), assistant_model=draft)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, prompt(1, 8), assistant_model=draft)


# ---------------------------------------------------------------- backends and devices
@pytest.mark.parametrize("backend", ["flash_attention_2", "flex_attention"])
def test_a_backend_without_tree_masks_verifies_through_sdpa_and_is_restored(backend, monkeypatch):
    """The prefill is mocked to run under sdpa as well: the kernels are not here."""
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    stock = run(model, ids)
    draft = OracleDraft.for_texts(model, stock.sequences)
    config = text_config(model)
    seen = []
    forward = type(model).forward

    def mocked(self, *args, **kwargs):
        seen.append(config._attn_implementation)
        before = config._attn_implementation
        config._attn_implementation = "sdpa"
        try:
            return forward(self, *args, **kwargs)
        finally:
            config._attn_implementation = before

    mocked.__signature__ = __import__("inspect").signature(forward)
    monkeypatch.setattr(type(model), "forward", mocked)
    config._attn_implementation = backend
    drafted = run(model, ids, assistant_model=draft)
    assert torch.equal(stock.sequences, drafted.sequences)
    assert seen[0] == backend and set(seen[1:]) == {"sdpa"} and config._attn_implementation == backend


class _Int4Linear(torch.nn.Module):
    """Weight-only quantization, as bitsandbytes, GPTQ or AWQ do it: integer weights, computed in float."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.codes.to(inputs.dtype) * self.scale, self.bias)


def test_a_quantized_target_is_lossless_against_itself():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    plain = run(model, ids).sequences
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, _Int4Linear(child))
    stock = run(model, ids)
    assert not torch.equal(stock.sequences, plain)
    drafts = [OracleDraft.for_texts(model, stock.sequences), tiny_draft(model, vocab=60)]
    for draft in drafts:
        assert torch.equal(run(model, ids, assistant_model=draft).sequences, stock.sequences)


# ---------------------------------------------------------------- surroundings
def test_the_text_generation_pipeline_takes_a_draft():
    model, tokenizer = FAMILIES["llama"].build(), tiny_tokenizer()
    draft = tiny_draft(model, vocab=60)
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    texts = ["ABC", "HELLO"]
    tokenizer.padding_side = "left"
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    fast = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    for size in (1, 2):
        assert fast(texts, generation_config=config, batch_size=size) == plain(
            texts, generation_config=config, batch_size=size
        )


def test_the_unpatched_route_serves_batches_and_static_caches():
    model = FAMILIES["llama"].build()
    ids = prompt(2, 8)
    draft = OracleDraft.for_texts(model, run(model, ids).sequences)
    for kwargs in ({}, {"cache_implementation": "static"}):
        stock = run(model, ids, **kwargs)
        drafted = run(model, ids, custom_generate=TreeDecoder(draft), **kwargs)
        assert torch.equal(stock.sequences, drafted.sequences) and drafted.statistics.accepted_tokens > NEW


def test_one_warning_beyond_the_trained_length_and_never_an_error():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    draft = tiny_draft(model, vocab=60)
    draft.config.trained_length = 16
    draft.config.max_position_embeddings = 16  # no table: angles are computed
    with pytest.warns(UserWarning, match="trained on up to 16"):
        drafted = run(model, ids, max_new_tokens=60, assistant_model=draft)
    assert torch.equal(drafted.sequences, run(model, ids, max_new_tokens=60).sequences)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, ids, max_new_tokens=60, assistant_model=draft)


def test_a_chain_draft_tree_one_token_deep():
    model = FAMILIES["llama"].build()
    ids = prompt(1, 12)
    stock = run(model, ids)
    for tree in (TreeConfig(1, 1, 1), TreeConfig(1, 3, 3), TreeConfig(6, 1, 6)):
        draft = OracleDraft.for_texts(model, stock.sequences, tree=tree)
        assert torch.equal(run(model, ids, assistant_model=draft).sequences, stock.sequences)
