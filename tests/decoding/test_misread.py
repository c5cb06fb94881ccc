# SPDX-License-Identifier: Apache-2.0
"""Draft folders that were loaded as language models are recognised and named."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gto_hf import AutoDraft, Eagle3Draft
from gto_hf.export import ENGINES, export
from tests.tiny import tiny_draft, tiny_target


PROMPT = torch.tensor([[5, 9, 30, 7]])
KWARGS = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "speculators"])
def test_an_exported_draft_read_as_a_language_model_is_named(tmp_path, target, engine):
    export(tiny_draft(target), tmp_path / "draft", engine, target=target)
    misread = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", ignore_mismatched_sizes=True)
    with pytest.raises(ValueError, match=r"draft head.*AutoDraft\.from_pretrained\('.*draft'"):
        target.generate(PROMPT, assistant_model=misread, **KWARGS)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_whose_config_says_nothing_is_recognised_by_its_weights(tmp_path, target, file):
    from safetensors.torch import save_file

    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = {"fc.weight": torch.zeros(32, 64), "layers.0.mlp.up_proj.weight": torch.zeros(64, 32)}
    save_file(weights, tmp_path / file) if file.endswith("safetensors") else torch.save(weights, tmp_path / file)
    assert not {"draft_vocab_size", "eagle_config"} & set(json.loads((tmp_path / "config.json").read_text()))
    misread = AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    with pytest.raises(ValueError, match="fc.weight"):
        target.generate(PROMPT, assistant_model=misread, **KWARGS)


def test_our_own_folder_comes_back_as_the_draft_it_is(tmp_path, target):
    draft = tiny_draft(target)
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is Eagle3Draft
    output = target.generate(PROMPT, assistant_model=loaded, return_dict_in_generate=True, **KWARGS)
    assert output.statistics.drafted_tokens > 0
    assert torch.equal(output.sequences, target.generate(PROMPT, **KWARGS))


def test_an_ordinary_one_layer_assistant_is_left_alone(tmp_path, target):
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (assistant, LlamaForCausalLM(config)):
        assert torch.equal(target.generate(PROMPT, assistant_model=each, **KWARGS), target.generate(PROMPT, **KWARGS))
    with pytest.raises(ValueError):
        AutoDraft.from_pretrained(tmp_path)
