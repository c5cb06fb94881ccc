# SPDX-License-Identifier: Apache-2.0
"""
The contract, on one tiny model of every architecture: which route it takes, and that the text is stock generation's.

The core runs by default; `GTO_HF_FULL=1` adds every attention implementation to every kind of request.
"""

import copy
import os

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from gto_hf import CausalLMDraft, TreeConfig
from gto_hf.evaluation.lossless import tree_error
from gto_hf.target import decoding_route
from tests.families import FAMILIES, image_inputs, prompt
from tests.oracle import OracleDraft


FULL = bool(os.environ.get("GTO_HF_FULL"))
NEW = 20
# Windows, chunks, shared keys, latent attention, experts, learned positions, soft caps, sinks, several streams.
VARIED = [
    "llama",
    "gpt2",
    "deepseek_v3",
    "mistral",
    "gemma3_text",
    "llama4_text",
    "gemma4_text_shared",
    "gemma3n_text",
]
VARIED += ["gpt_oss", "qwen2_5_vl", "lfm2", "bloom"]


def rows(names, *routes):
    """(family, attention) pairs; only the first implementation unless all are asked for."""
    found = []
    for name in names:
        family = FAMILIES[name]
        if family.route in routes:
            found += [(name, a) for a in (family.attention or ("",))[: None if FULL else 1]]
    return found


BUILT = {}


def build(name, attention):
    if (name, attention) not in BUILT:
        BUILT.clear()  # one at a time
        BUILT[name, attention] = FAMILIES[name].build(**({"attention": attention} if attention else {}))
    return BUILT[name, attention]


def stock_and_drafted(model, ids, *, mask=None, draft=None, **kwargs):
    """(stock output, drafted output) from the same seed; the draft knows what stock wrote unless one is given."""
    kwargs = {
        "attention_mask": torch.ones_like(ids) if mask is None else mask,
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        **kwargs,
    }
    torch.manual_seed(0)
    stock = model.generate(ids, **copy.copy(kwargs))
    if draft is None:
        lengths = kwargs["attention_mask"].sum(1)
        texts = [row[ids.shape[1] - n :] for row, n in zip(stock.sequences, lengths.tolist(), strict=True)]
        draft = OracleDraft.for_texts(model, texts)
    torch.manual_seed(0)
    return stock, model.generate(ids, assistant_model=draft, **copy.copy(kwargs))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name, attention", rows(FAMILIES, "tree", "chain"))
def test_greedy_text_and_route(name, attention):
    model = build(name, attention)
    assert decoding_route(model).kind == FAMILIES[name].route
    stock, drafted = stock_and_drafted(model, prompt(1, 12))
    assert torch.equal(stock.sequences, drafted.sequences)
    assert drafted.statistics.rounds < NEW * 0.8  # fewer rounds than tokens
    assert drafted.statistics.accepted_tokens > NEW / 3
    assert stock.cache.get_seq_length() == drafted.cache.get_seq_length()


@pytest.mark.parametrize("name, attention", rows(FAMILIES, "tree"))
def test_a_small_tree_equals_sequential_forwards(name, attention):
    assert tree_error(build(name, attention)) < 1e-4  # blind siblings or a wrong window give 1e-2 and more


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].route == "refused"])
def test_refused_families_say_why_before_any_forward(name, monkeypatch):
    model = build(name, (FAMILIES[name].attention or ("",))[0])
    monkeypatch.setattr(type(model), "__call__", lambda *a, **k: pytest.fail("a forward ran before the refusal"))
    draft = OracleDraft.for_texts(FAMILIES["llama"].build(), prompt(1, 12))
    with pytest.raises(ValueError, match="recurrent state|encoder-decoder"):
        model.generate(prompt(1, 12), attention_mask=torch.ones(1, 12), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("name, attention", rows(FAMILIES, "tree"))
def test_rows_of_a_padded_batch_equal_their_single_runs(name, attention):
    model = build(name, attention)
    lengths, width = (12, 5, 9), 12
    singles, ids = [], torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        one = prompt(1, length, seed=length)
        out = model.generate(
            one, attention_mask=torch.ones_like(one), do_sample=False, max_new_tokens=NEW, eos_token_id=None
        )
        singles.append(out[0])
        ids[row, width - length :] = one[0]
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    forwards = []
    hook = model.register_forward_hook(lambda *a: forwards.append(1))
    try:
        out = model.generate(
            ids,
            attention_mask=mask,
            assistant_model=OracleDraft.for_texts(model, singles),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
    finally:
        hook.remove()
    for row, length in enumerate(lengths):
        assert torch.equal(out.sequences[row, width:], singles[row][length:]), row
    statistics = out.statistics
    assert len(forwards) == statistics.target_forwards < NEW  # one for the prompts, one per round of all rows
    assert statistics.rounds > statistics.target_forwards and statistics.accepted_tokens > NEW


@pytest.mark.parametrize("name, attention", rows(VARIED if not FULL else FAMILIES, "tree", "chain"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sampling_processors_and_stops(name, attention):
    model = build(name, attention)
    ids = prompt(1, 12)
    stock, drafted = stock_and_drafted(model, ids, do_sample=True, temperature=0.7, top_k=20)
    assert torch.equal(stock.sequences, drafted.sequences)
    text = stock.sequences[0, 12:].tolist()
    kwargs = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": True,
        "temperature": 0.7,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "eos_token_id": [text[8], text[11]],
    }
    torch.manual_seed(0)
    stock = model.generate(ids, logits_processor=[_Processor()], **kwargs)
    draft, streamer = OracleDraft.for_texts(model, stock), _Collect()
    torch.manual_seed(0)
    drafted = model.generate(ids, assistant_model=draft, logits_processor=[_Processor()], streamer=streamer, **kwargs)
    assert torch.equal(stock, drafted)
    assert streamer.ids == stock[0].tolist() and streamer.ends == 1


class _Processor(LogitsProcessor):
    """Stateful: bans a token that depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, 3 + self.calls % 7] = -torch.inf
        return scores


class _Collect(BaseStreamer):
    def __init__(self):
        self.ids, self.ends = [], 0

    def put(self, value):
        self.ids.extend(value.flatten().tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("name, attention", rows(["gemma3", "qwen2_5_vl", "llava"], "tree"))
def test_text_after_an_image_equals_stock(name, attention):
    model = build(name, attention)
    inputs = image_inputs(FAMILIES[name], model)
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True}
    stock = model.generate(**inputs, **kwargs)
    draft = OracleDraft.for_texts(model, stock.sequences)
    drafted = model.generate(**inputs, assistant_model=draft, **kwargs)
    assert torch.equal(stock.sequences, drafted.sequences)
    assert drafted.statistics.accepted_tokens > NEW / 3


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "gpt2", "gemma2", "granite", "cohere2", "deepseek_v3", "gemma3n_text", "llama4_text"],
)
def test_a_language_model_drafting_for_its_copy_is_always_right(name):
    model = build(name, FAMILIES[name].attention[0])
    draft = CausalLMDraft(copy.deepcopy(model), tree=TreeConfig(depth=4, top_k=3, total_tokens=12))
    stock, drafted = stock_and_drafted(model, prompt(1, 12), draft=draft)
    assert torch.equal(stock.sequences, drafted.sequences)
    # Granite scales its logits so that more than one path is likely; nothing is ever wrong at the first level.
    assert drafted.statistics.accepted_histogram[0] == 0 and drafted.statistics.mean_accepted > 3
