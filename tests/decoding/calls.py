# SPDX-License-Identifier: Apache-2.0
"""`generate` on tiny targets, with and without a draft that knows the text."""

import copy

import torch

from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft


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


def tiny_draft_of(model):
    return OracleDraft.for_texts(model, prompt(1, 30))
