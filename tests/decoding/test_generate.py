# SPDX-License-Identifier: Apache-2.0
"""Everything around the text: hook, streamers, stop rules, padding, caches, statistics, refusals."""

import warnings

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import gto_hf
from gto_hf import Eagle3Draft, TreeConfig, TreeDecoder
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer


GREEDY = {"do_sample": False, "eos_token_id": None}


def run(target, prompt, **kwargs):
    return target.generate(prompt, **{"attention_mask": torch.ones_like(prompt), **GREEDY, **kwargs})


# ---------------------------------------------------------------- hook
def test_install_twice_and_uninstall_restores_transformers():
    gto_hf.install()
    hooked = GenerationMixin._assisted_decoding
    gto_hf.install()
    assert GenerationMixin._assisted_decoding is hooked
    gto_hf.uninstall()
    try:
        assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
        assert not hasattr(GenerationMixin._validate_generation_mode, "__wrapped__")
        gto_hf.uninstall()
    finally:
        assert gto_hf.install()


def test_another_assistant_keeps_its_stock_behaviour(llama):
    assistant = tiny_target("llama", seed=4)
    prompt = torch.randint(3, 64, (1, 6))
    with_assistant = run(llama, prompt, assistant_model=assistant, max_new_tokens=20)
    assert torch.equal(with_assistant, run(llama, prompt, max_new_tokens=20))
    with pytest.raises(ValueError, match="different tokenizers"):
        run(llama, prompt, assistant_model=tiny_target("llama", vocab=32), max_new_tokens=5)


def test_an_unknown_transformers_signature_disables_the_hook_with_a_way_out(monkeypatch):
    gto_hf.uninstall()
    original = GenerationMixin._assisted_decoding
    try:
        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", lambda self, other: None)
        with pytest.warns(UserWarning, match="TreeDecoder"):
            assert not gto_hf.install()
    finally:
        monkeypatch.undo()
        assert GenerationMixin._assisted_decoding is original
        assert gto_hf.install()


def test_a_path_as_assistant_is_refused_with_what_to_do(llama):
    with pytest.raises(ValueError, match="AutoDraft"):
        run(llama, torch.randint(3, 64, (1, 6)), assistant_model="runs/phase2", max_new_tokens=4)


def test_a_draft_inside_peft_is_recognised(llama, draft):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(draft, LoraConfig(r=2, target_modules=["fc", "q_proj"]))
    prompt = torch.randint(3, 64, (1, 6))
    out = run(llama, prompt, assistant_model=wrapped, max_new_tokens=12, return_dict_in_generate=True)
    assert torch.equal(out.sequences, run(llama, prompt, max_new_tokens=12))
    assert out.statistics.rounds > 0


def test_a_target_inside_peft_decodes_with_its_active_adapter(draft):
    from peft import LoraConfig, get_peft_model

    target = tiny_target("llama")
    wrapped = get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    prompt = torch.randint(3, 64, (1, 6))
    mask = torch.ones_like(prompt)
    kwargs = {"attention_mask": mask, "max_new_tokens": 25, **GREEDY}
    adapted = wrapped.generate(input_ids=prompt, **kwargs)
    assert torch.equal(wrapped.generate(input_ids=prompt, assistant_model=draft, **kwargs), adapted)
    with wrapped.disable_adapter():
        assert not torch.equal(wrapped.generate(input_ids=prompt, **kwargs), adapted)


# ---------------------------------------------------------------- stops
class _StopAt(StoppingCriteria):
    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([int(input_ids[0, -1]) == self.token])


def test_a_custom_criterion_stops_inside_a_path_and_sees_every_prefix(trained):
    target, draft, prompts = trained
    text = run(target, prompts[:1], max_new_tokens=40)[0, 6:].tolist()
    token = text[9]
    stock, tree = _StopAt(token), _StopAt(token)
    a = run(target, prompts[:1], max_new_tokens=40, stopping_criteria=[stock])
    b = run(target, prompts[:1], max_new_tokens=40, stopping_criteria=[tree], assistant_model=draft)
    assert torch.equal(a, b) and b.shape[1] < 46
    assert stock.lengths == tree.lengths


def test_stop_strings_stop_where_stock_stops(trained):
    target, draft, prompts = trained
    tokenizer = tiny_tokenizer()
    text = run(target, prompts[:1], max_new_tokens=40)[0, 6:].tolist()
    kwargs = {"max_new_tokens": 40, "stop_strings": [tokenizer.decode(text[12:14])], "tokenizer": tokenizer}
    a, b = run(target, prompts[:1], **kwargs), run(target, prompts[:1], assistant_model=draft, **kwargs)
    assert torch.equal(a, b) and b.shape[1] < 46


# ---------------------------------------------------------------- streamers
class _Collect(BaseStreamer):
    def __init__(self):
        self.ids, self.puts, self.ends = [], 0, 0

    def put(self, value):
        assert not self.ends
        self.puts += 1
        self.ids.extend(value.flatten().tolist())

    def end(self):
        self.ends += 1


def test_a_streamer_gets_every_token_once_and_ends_once(trained):
    target, draft, prompts = trained
    text = run(target, prompts[:1], max_new_tokens=40)[0, 6:].tolist()
    for eos in (None, text[10]):
        streamer = _Collect()
        out = run(target, prompts[:1], max_new_tokens=40, assistant_model=draft, streamer=streamer, eos_token_id=eos)
        assert streamer.ids == out[0].tolist() and streamer.ends == 1
        assert streamer.puts < out.shape[1] - 6 + 1  # tokens of a round come together
    streamer = _Collect()
    out = run(target, prompts[:1], max_new_tokens=20, custom_generate=TreeDecoder(draft, streamer=streamer))
    assert streamer.ids == out[0].tolist() and streamer.ends == 1


def test_text_iterator_streamer_gives_the_text(trained):
    target, draft, prompts = trained
    tokenizer = tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    out = run(target, prompts[:1], max_new_tokens=20, assistant_model=draft, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, 6:])


# ---------------------------------------------------------------- inputs
def test_left_padding_gives_the_unpadded_text(trained):
    target, draft, prompts = trained
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompts[:1]], 1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    kwargs = {"max_new_tokens": 30, "attention_mask": mask, "return_dict_in_generate": True}
    stock, tree = run(target, padded, **kwargs), run(target, padded, assistant_model=draft, **kwargs)
    assert torch.equal(stock.sequences, tree.sequences)
    alone = run(target, prompts[:1], max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True)
    assert tree.statistics == alone.statistics  # the draft sees the same pairs on the same positions


def test_generation_continues_from_the_users_cache(trained):
    target, draft, prompts = trained
    whole = run(target, prompts[:1], max_new_tokens=40)
    cache = DynamicCache(config=target.config)
    first = run(target, prompts[:1], max_new_tokens=15, assistant_model=draft, cache=cache)
    assert cache.get_seq_length() == first.shape[1] - 1
    second = run(target, first, max_new_tokens=25, assistant_model=draft, cache=cache)
    assert torch.equal(second, whole)
    assert cache.get_seq_length() == whole.shape[1] - 1
    # and stock generation can go on from a cache that trees have left behind
    cache = DynamicCache(config=target.config)
    first = run(target, prompts[:1], max_new_tokens=15, assistant_model=draft, cache=cache)
    assert torch.equal(run(target, first, max_new_tokens=25, cache=cache), whole)


def test_a_generation_config_object_is_honoured_and_left_alone(trained):
    target, draft, prompts = trained
    config = GenerationConfig(max_new_tokens=17, do_sample=True, temperature=0.5, eos_token_id=None, pad_token_id=0)
    before = config.to_dict()
    mask = torch.ones_like(prompts[:1])
    torch.manual_seed(1)
    a = target.generate(prompts[:1], attention_mask=mask, generation_config=config)
    torch.manual_seed(1)
    b = target.generate(prompts[:1], attention_mask=mask, generation_config=config, assistant_model=draft)
    assert torch.equal(a, b) and config.to_dict() == before


def test_chunked_prefill_keeps_the_text(trained):
    target, draft, prompts = trained
    prompt = run(target, prompts[:1], max_new_tokens=20)
    a = run(target, prompt, max_new_tokens=20)
    assert torch.equal(run(target, prompt, max_new_tokens=20, assistant_model=draft, prefill_chunk_size=7), a)


def test_draft_in_another_dtype_than_the_target_works(trained):
    target, draft, prompts = trained
    import copy

    half = copy.deepcopy(draft).to(torch.bfloat16)
    out = run(target, prompts[:1], max_new_tokens=30, assistant_model=half, return_dict_in_generate=True)
    assert torch.equal(out.sequences, run(target, prompts[:1], max_new_tokens=30))
    assert out.statistics.mean_accepted > 1


# ---------------------------------------------------------------- positions
def oracle(target, text):
    """A draft that proposes what stock generation will write, so that trees accept much."""
    return OracleDraft.for_texts(target, text, tree=TreeConfig(depth=6, top_k=2, total_tokens=10), miss=0.0)


def test_trees_stop_at_the_end_of_a_position_table():
    target = tiny_target("gpt2")
    target.config.n_positions = 40
    target.transformer.wpe.weight.data = target.transformer.wpe.weight.data[:40]
    target.transformer.wpe.num_embeddings = 40
    prompt = torch.randint(3, 64, (1, 6))
    kwargs = {"max_new_tokens": 200, "stopping_criteria": [_StopAtLength(38)]}
    stock = run(target, prompt, **kwargs)
    draft = oracle(target, stock)
    with pytest.warns(UserWarning, match="positions end or change at 40"):
        out = run(target, prompt, assistant_model=draft, return_dict_in_generate=True, **kwargs)
    assert torch.equal(out.sequences, stock)
    assert out.statistics.accepted_tokens > 20


class _StopAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


def _rope_target(**rope):
    target = tiny_target("llama")
    config = LlamaConfig(
        **(target.config.to_dict() | {"rope_parameters": {"rope_theta": 1e4, **rope["rope"]}, **rope["config"]})
    )
    other = LlamaForCausalLM(config).eval()
    other.load_state_dict(target.state_dict())
    return other


def test_a_dynamic_rope_target_keeps_its_text_across_the_switch():
    target = _rope_target(rope={"rope_type": "dynamic", "factor": 4.0}, config={"max_position_embeddings": 24})
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = torch.randint(3, 64, (1, 6))
        stock = run(target, prompt, max_new_tokens=50)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draft = oracle(target, stock)
            out = run(target, prompt, max_new_tokens=50, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(out.sequences, stock)
        assert out.statistics.accepted_tokens >= 10  # trees were drafted up to the switch


def test_a_longrope_target_is_refused_across_its_switch_only():
    rope = {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 8.0],
        "original_max_position_embeddings": 24,
    }
    target = _rope_target(rope=rope, config={"max_position_embeddings": 96})
    draft, prompt = tiny_draft(target), torch.randint(3, 64, (1, 6))
    with pytest.raises(ValueError, match="longrope"):
        run(target, prompt, max_new_tokens=50, assistant_model=draft)
    a = run(target, prompt, max_new_tokens=18)
    assert torch.equal(run(target, prompt, max_new_tokens=18, assistant_model=draft), a)


# ---------------------------------------------------------------- state and statistics
def test_statistics_add_up(trained):
    target, draft, prompts = trained
    text = run(target, prompts[:1], max_new_tokens=40)[0, 6:].tolist()
    for kwargs in ({"max_new_tokens": 33}, {"max_new_tokens": 40, "eos_token_id": text[17]}, {"max_new_tokens": 1}):
        out = run(target, prompts[:1], assistant_model=draft, return_dict_in_generate=True, **kwargs)
        s, new = out.statistics, out.sequences.shape[1] - 6
        assert s.emitted_tokens == new == 1 + s.accepted_tokens + s.bonus_tokens
        assert sum(s.accepted_histogram) == s.rounds == s.target_forwards - 1
        assert s.rounds - 1 <= s.bonus_tokens <= s.rounds  # only the last round can be cut before its bonus token
        assert s.drafted_tokens <= 20 * s.rounds
        # reading the prompt, reading accepted tokens after every round but the last, and depth - 1 levels per tree
        assert s.draft_forwards <= 1 + (s.rounds - 1) + 3 * s.rounds if s.rounds else s.draft_forwards == 0


def test_two_equal_calls_do_equal_work(trained):
    target, draft, prompts = trained
    kwargs = {"max_new_tokens": 30, "assistant_model": draft, "return_dict_in_generate": True}
    first = run(target, prompts[:1], **kwargs)
    run(target, prompts[1:2], **kwargs)
    again = run(target, prompts[:1], **kwargs)
    assert first.statistics == again.statistics and torch.equal(first.sequences, again.sequences)


def test_chain_is_a_tree_with_top_k_one(trained):
    target, draft, prompts = trained
    tree = draft.tree
    try:
        draft.tree = TreeConfig(depth=4, top_k=1, total_tokens=4)
        out = run(target, prompts[:1], max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True)
    finally:
        draft.tree = tree
    assert torch.equal(out.sequences, run(target, prompts[:1], max_new_tokens=30))
    assert out.statistics.mean_accepted > 1


def test_the_drafts_cache_after_rounds_equals_a_recompute_from_true_features(trained, monkeypatch):
    """Nothing drafted survives: the last root's logits equal those of a fresh pass over the accepted text."""
    from gto_hf.decoding.drafter import Drafter
    from gto_hf.drafts import DraftPrefix

    target, draft, prompts = trained
    seen = []
    original = Drafter.grow

    def grow(self, *args):
        tree = original(self, *args)
        seen.append((draft.head(self._last)[0, 0], len(self.prefix.valid[0])))
        return tree

    monkeypatch.setattr(Drafter, "grow", grow)
    out = run(target, prompts[:1], max_new_tokens=40, assistant_model=draft)
    assert len(seen) > 3
    layers = list(draft.config.feature_layers)
    with torch.no_grad():
        states = target(out, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in layers], -1)
        for logits, pairs in seen:
            prefix = DraftPrefix(draft)
            fresh = prefix.extend(features[:, :pairs], out[:, 1 : pairs + 1], torch.arange(pairs)[None])
            torch.testing.assert_close(draft.head(fresh[:, -1])[0], logits, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- refusals
@pytest.fixture
def no_forward(llama, monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("a forward ran before the refusal")

    monkeypatch.setattr(llama, "forward", forward)
    # generate reads the signature of forward
    forward.__signature__ = __import__("inspect").signature(type(llama).forward.__get__(llama))
    return llama


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ],
)
@pytest.mark.parametrize("route", ["hook", "custom"])
def test_unsupported_requests_are_refused_before_any_forward(no_forward, draft, kwargs, words, route):
    prompt = torch.randint(3, 64, (1, 6))
    how = {"assistant_model": draft} if route == "hook" else {"custom_generate": TreeDecoder(draft)}
    with pytest.raises(ValueError, match=words):
        run(no_forward, prompt, max_new_tokens=5, **how, **kwargs)


def test_encoder_decoders_are_refused(draft):
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=8, num_heads=4, decoder_start_token_id=0, eos_token_id=2
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(torch.randint(3, 64, (1, 6)), assistant_model=draft)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"target_hidden_size": 48, "own_embeddings": True}, "hidden_size=32"),
        ({"vocab_size": 80}, "vocab_size=64"),
        ({"feature_layers": [2, 5, 11]}, "8 layers"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_numbers(llama, change, words):
    config = tiny_draft(llama).config.to_dict() | change
    other = Eagle3Draft(gto_hf.DraftConfig(**config))
    other.set_vocab(torch.arange(48))
    with pytest.raises(ValueError, match=words):
        run(llama, torch.randint(3, 64, (1, 6)), max_new_tokens=5, assistant_model=other)


def test_another_target_of_the_same_shape_only_warns(llama, draft):
    draft.config.target = {**draft.config.target, "name_or_path": "org/one"}
    llama.config._name_or_path = "org/two"
    draft._borrowed.module = None
    with pytest.warns(UserWarning, match="org/one"):
        run(llama, torch.randint(3, 64, (1, 6)), max_new_tokens=5, assistant_model=draft)


def test_no_warning_in_ordinary_use(llama, draft):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(llama, torch.randint(3, 64, (1, 6)), max_new_tokens=5, assistant_model=draft)
