# SPDX-License-Identifier: Apache-2.0
"""Targets that are padded otherwise, have another tokenizer, or are another model."""

import copy
import warnings

import pytest
import torch

from gto_hf import AutoDraft, Eagle3Draft, GTOConfig, GTOTrainer
from gto_hf.target import tokenizer_hash, tokenizer_rows
from tests.tiny import TREE, VOCAB, tiny_draft, tiny_target, tiny_tokenizer, written_rows


PROMPT = torch.tensor([[5, 9, 30, 7]])
KWARGS = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 16, "do_sample": False}


def padded(rows, seed=0):
    """The tiny target with padding rows that it never says, or without its last rows."""
    target = tiny_target(seed=seed)
    target.resize_token_embeddings(rows)
    with torch.no_grad():
        target.get_output_embeddings().weight[VOCAB:] = 0
    return target


def named(draft, tokenizer=None):
    """The draft, knowing its tokenizer."""
    draft.config.target["tokenizer"] = tokenizer_hash(tokenizer or tiny_tokenizer())
    return draft


def other_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def test_a_tokenizers_hash_is_that_of_its_ids_only():
    plain, same = tiny_tokenizer(), tiny_tokenizer()
    same.padding_side, same.chat_template = "left", "{{ messages }}"
    assert tokenizer_hash(plain) == tokenizer_hash(same) != tokenizer_hash(other_tokenizer())
    assert tokenizer_rows(plain) == 64 and tokenizer_rows(other_tokenizer()) == 65


def test_from_target_records_the_tokenizer_and_old_folders_have_none(tmp_path):
    target = tiny_target()
    draft = Eagle3Draft.from_target(target, tokenizer=tiny_tokenizer())
    assert draft.config.target["tokenizer"] == tokenizer_hash(tiny_tokenizer())
    draft.save_pretrained(tmp_path)
    assert AutoDraft.from_pretrained(tmp_path, target=target).config.target == draft.config.target
    assert "tokenizer" not in tiny_draft(target).config.target


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("vocab", [48, VOCAB])
def test_a_padded_target_with_the_same_tokenizer_pairs(vocab, own):
    draft = named(tiny_draft(tiny_target(), vocab=vocab))
    if own:
        draft = named(Eagle3Draft.from_target(tiny_target(), own_embeddings=True, tree=TREE))
        vocab = VOCAB
    target = padded(72)
    draft.attach(target, tokenizer=tiny_tokenizer())
    assert draft.config.vocab_size == 72 and draft.config.draft_vocab_size == vocab
    assert len(draft.t2d) == 72 and int(draft.t2d.sum()) == vocab and not draft.t2d[VOCAB:].any()
    output = target.generate(PROMPT, assistant_model=draft, return_dict_in_generate=True, **KWARGS)
    assert torch.equal(output.sequences, target.generate(PROMPT, **KWARGS))
    assert output.statistics.drafted_tokens > 0


def test_a_target_with_fewer_rows_loses_the_drafts_padding(tmp_path):
    wide = padded(72)
    draft = named(Eagle3Draft.from_target(wide, tree=TREE).eval())  # says padding rows too
    head = draft.lm_head.weight.clone()
    target = tiny_target()
    draft.attach(target, tokenizer=tiny_tokenizer())
    assert draft.config.vocab_size == draft.config.draft_vocab_size == VOCAB
    assert torch.equal(draft.lm_head.weight, head[:VOCAB]) and draft.lm_head.out_features == VOCAB
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, **KWARGS), target.generate(PROMPT, **KWARGS))
    draft.save_pretrained(tmp_path)
    again = AutoDraft.from_pretrained(tmp_path, target=target)
    assert torch.equal(again.lm_head.weight, head[:VOCAB])


def test_the_targets_own_folder_tells_its_tokenizer(tmp_path):
    target = padded(72)
    target.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = type(target).from_pretrained(tmp_path)
    draft = named(tiny_draft(tiny_target()))
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, **KWARGS), target.generate(PROMPT, **KWARGS))
    other_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="64, but .*72.*tokenizers differ"):
        target.generate(PROMPT, assistant_model=named(tiny_draft(tiny_target())), **KWARGS)


def test_sizes_that_cannot_work_say_both_numbers():
    draft, target = tiny_draft(tiny_target()), padded(72)
    with pytest.raises(ValueError, match="of 64, but .*`vocab_size=72`.*tokenizer=tokenizer"):
        draft.attach(target)
    assert draft.config.vocab_size == VOCAB  # nothing changed
    draft.attach(target, tokenizer=tiny_tokenizer())  # the user vouches for it
    small = padded(40)
    with pytest.raises(ValueError, match="72, but .*`vocab_size=40`.* 64 tokens"):
        draft.attach(small, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="tokenizers differ"):
        named(tiny_draft(tiny_target()), other_tokenizer()).attach(target, tokenizer=tiny_tokenizer())


def test_a_target_that_is_resized_after_it_was_attached_is_checked_again():
    target = tiny_target()
    draft = tiny_draft(target)
    target.resize_token_embeddings(72)
    with pytest.raises(ValueError, match="of 64, but .*`vocab_size=72`"):
        draft.attach(target)
    draft.attach(target, tokenizer=tiny_tokenizer())
    assert draft.config.vocab_size == len(draft.t2d) == 72


def test_an_offloaded_embedding_is_not_compared():
    target = tiny_target()
    draft = Eagle3Draft.from_target(target, own_embeddings=True)
    target.get_input_embeddings().weight = torch.nn.Parameter(target.get_input_embeddings().weight.to("meta"))
    draft.share_embedding(target)
    assert draft.config.own_embeddings


def test_another_model_or_revision_warns_once():
    target, other = tiny_target(), tiny_target()
    target.config._name_or_path, other.config._name_or_path = "org/base", "org/tuned"
    draft = tiny_draft(target)
    with pytest.warns(UserWarning, match="org/base.*org/tuned"):
        draft.attach(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft.check_target(other)
        draft.check_target(target)
    revised = copy.deepcopy(target)
    draft.config.target["revision"], revised.config._commit_hash = "a" * 40, "b" * 40
    with pytest.warns(UserWarning, match="revision"):
        draft.check_target(revised)


def test_another_tokenizer_or_quantization_of_the_same_sizes_warns_once():
    target, draft = tiny_target(), named(tiny_draft(tiny_target()))
    with pytest.warns(UserWarning, match="another tokenizer"):
        draft.attach(target, tokenizer=other_tokenizer())
    quantized = tiny_target()
    quantized.config.quantization_config = {"quant_method": "gptq"}
    with pytest.warns(UserWarning, match="quantization=none.*gptq"):
        draft.attach(quantized)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft.check_target(quantized, tokenizer=other_tokenizer())
        draft.check_target(target, tokenizer=tiny_tokenizer())
        draft.config.target = {"num_hidden_layers": 8}  # what is unknown differs from nothing
        draft.check_target(quantized, tokenizer=tiny_tokenizer())


def trainer(folder, draft, target, tokenizer, **kwargs):
    args = GTOConfig(str(folder), max_steps=1, bf16=False, report_to="none", report=False, eval_prompts=0, **kwargs)
    rows = written_rows(target, 4, 20)
    from datasets import Dataset

    return GTOTrainer(draft, target, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def test_another_tokenizer_of_the_same_size_warns_once():
    target = tiny_target()
    draft = Eagle3Draft.from_target(target, tokenizer=tiny_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft.attach(target, tokenizer=tiny_tokenizer())
    for model in (target, tiny_target()):  # attached before, and not yet
        other = copy.deepcopy(draft)
        with pytest.warns(UserWarning, match="another tokenizer"):
            other.attach(model, tokenizer=other_tokenizer())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.attach(model, tokenizer=other_tokenizer())


def test_the_trainer_records_the_tokenizer_and_warns_of_another(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    trainer(tmp_path, draft, target, tiny_tokenizer())
    assert draft.config.target["tokenizer"] == tokenizer_hash(tiny_tokenizer())
    with pytest.warns(UserWarning, match="another tokenizer"):
        trainer(tmp_path, draft, target, other_tokenizer())
    assert draft.config.target["tokenizer"] == tokenizer_hash(other_tokenizer())


def test_the_trainer_records_a_target_without_a_name(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    draft.config.target = None  # as of a published checkpoint
    target.config.quantization_config = {"quant_method": "gptq"}
    trainer(tmp_path, draft, target, tiny_tokenizer())
    found = draft.config.target
    assert (found["num_hidden_layers"], found["vocab_size"], found["quantization"]) == (8, VOCAB, "gptq")
    assert found["tokenizer"] == tokenizer_hash(tiny_tokenizer())
    target.config._name_or_path = "org/tuned"
    with pytest.warns(UserWarning, match="another tokenizer"):  # also when the name changes with it
        trainer(tmp_path, draft, target, other_tokenizer())
    target.config._name_or_path = ""
    trainer(tmp_path, draft, target, other_tokenizer())
    assert draft.config.target["name_or_path"] == "org/tuned"


def test_a_padded_pair_trains(tmp_path):
    target, draft = padded(72), named(tiny_draft(tiny_target()))
    made = trainer(tmp_path, draft, target, tiny_tokenizer(), num_groups=2, group_size=2)
    before = draft.lm_head.weight.clone()
    made.train()
    assert draft.config.vocab_size == 72 and not torch.equal(before, draft.lm_head.weight)


def test_a_draft_that_its_engine_could_not_load_is_not_trained(tmp_path):
    target = tiny_target()
    draft = Eagle3Draft.from_target(target, feature_layers=[1, 4, 5], tree=TREE)
    with pytest.raises(ValueError, match=r"safeailab.*\[2, 4, 5\] of 8"):
        trainer(tmp_path, draft, target, tiny_tokenizer(), export_to="safeailab")
    trainer(tmp_path, draft, target, tiny_tokenizer(), export_to="vllm")
    with pytest.raises(ValueError, match="export_to='tgi'.*sglang"):
        GTOConfig(str(tmp_path), export_to="tgi")
