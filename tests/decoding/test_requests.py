# SPDX-License-Identifier: Apache-2.0
"""What `generate` can be asked for beside the text: states, embedding prompts, chunks, backends."""

import copy
import warnings

import pytest
import torch
from transformers import GenerationConfig, pipeline

from gto_hf import CausalLMDraft, TreeConfig, TreeDecoder
from gto_hf.target import text_config
from tests.decoding.calls import NEW, pair, run, same_states, tiny_draft_of
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_tokenizer


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
