# SPDX-License-Identifier: Apache-2.0
"""Rows that stop at different times, streamers and processors of a batch, targets that take one row only."""

import warnings

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.decoding.calls import NEW, pair, run, tiny_draft_of
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft


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
