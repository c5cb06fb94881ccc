# SPDX-License-Identifier: Apache-2.0
"""Options, models and rows that a trainer refuses or counts."""

import pytest
import torch

from gto_hf import GTOConfig
from tests.families import FAMILIES
from tests.tiny import tiny_draft, tiny_target, written_rows
from tests.trainer.helpers import OFF, make, state


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"packing": True}, "packing"),
        ({"padding_free": True}, "padding_free|packing"),
        ({"loss_type": "dft"}, "loss_type"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"num_groups": 0}, "num_groups=0"),
        ({"group_size": -1}, "group_size=-1"),
        ({"gto_epsilon": 1.5}, "gto_epsilon=1.5"),
        ({"gto_weight": -0.1}, "gto_weight=-0.1"),
        ({"gto_aggregation": "median"}, "median"),
        ({"gto_path": "beam"}, "beam"),
        ({"ttt_steps": 0}, "ttt_steps=0"),
        ({"target_temperature": 0.0}, "target_temperature"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path, kwargs, words):
    with pytest.raises(ValueError, match=words):
        GTOConfig(str(tmp_path), **OFF, **kwargs)


def test_a_tree_larger_than_its_expansion_is_refused(llama, draft, rows, tmp_path):
    with pytest.raises(ValueError, match="total_tokens=13"):
        make(draft, llama, rows, tmp_path, tree_depth=2, tree_top_k=3, tree_total_tokens=13)
    with pytest.raises(ValueError, match="tree_top_k=49"):
        make(draft, llama, rows, tmp_path, tree_top_k=49)


def test_models_in_the_wrong_place_are_refused(llama, draft, rows, tmp_path):
    with pytest.raises(TypeError, match="target_model"):
        make(llama, draft, rows, tmp_path)
    with pytest.raises(ValueError, match="target_model"):
        make(draft, None, rows, tmp_path)
    with pytest.raises(ValueError, match="vocab_size=32"):
        make(draft, tiny_target(vocab=32), rows, tmp_path)


def test_rows_without_a_trainable_token_are_refused_or_counted(llama, draft, rows, tmp_path):
    masked = {"input_ids": [5, 6, 7, 8], "labels": [-100] * 4}
    with pytest.raises(ValueError, match="All 3 rows"):
        make(draft, llama, [masked] * 3, tmp_path)
    with pytest.raises(ValueError, match="max_length=4"):
        make(draft, llama, rows, tmp_path, max_length=4)  # prompts fill it
    with pytest.warns(UserWarning, match="1 of 9 rows"):
        make(draft, llama, [*rows, masked], tmp_path)


def test_rows_shorter_than_a_group_train_the_token_loss_and_are_counted(llama, draft, rows, tmp_path):
    short = [{k: v[:7] for k, v in row.items()} for row in rows[:2]]
    trainer = make(
        draft, llama, short, tmp_path, max_steps=1, per_device_train_batch_size=2, group_size=8, gto_weight=0.5
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["skipped_sequences"] == 2 and entry["trained_tokens"] == 6 and "gto/ratio" not in entry
    mixed = make(draft, llama, [short[0], rows[1]], tmp_path, max_steps=1, per_device_train_batch_size=2, group_size=8)
    mixed.train()
    assert mixed.state.log_history[0]["skipped_sequences"] == 1 and "gto/ratio" in mixed.state.log_history[0]


def test_a_batch_that_trains_nothing_gives_a_finite_zero(llama, draft, rows, tmp_path):
    # labels on positions 0 and 1 survive TRL's filter but have no root with a feature
    empty = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, -100]}, {"input_ids": [5], "labels": [5]}]
    with pytest.raises(ValueError, match="All 2 rows"):
        make(draft, llama, empty, tmp_path)
    before = state(draft)
    for row in empty:
        trainer = make(draft, llama, [row, *rows], tmp_path, max_steps=1, shuffle_dataset=False)
        loss = trainer.compute_loss(trainer.model, trainer.data_collator([row]))
        assert loss == 0 and loss.requires_grad
        loss.backward()
        assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())


def test_broken_rows_are_refused_before_training(llama, draft, rows, tmp_path):
    foreign = {"input_ids": [5, 6, 64], "labels": [5, 6, 64]}
    unequal = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7]}
    for broken, words in ((foreign, "token id 64"), (unequal, "3 labels for 4 tokens")):
        # one such row is skipped; when most are like that, the tokenizer is another one
        with pytest.warns(UserWarning, match=f"1 of 9 rows.*{words}"):
            make(draft, llama, [*rows, broken], tmp_path)
        with pytest.raises(ValueError, match=f"9 of 17 rows.*{words}"):
            make(draft, llama, [*rows, *[broken] * 9], tmp_path)


def test_targets_without_tree_support_are_refused_or_train_the_token_loss_alone(draft, rows, tmp_path):
    target = FAMILIES["bloom"].build()
    other = tiny_draft(target)
    with pytest.raises(ValueError, match="ALiBi.*gto_weight=0"):
        make(other, target, rows, tmp_path)
    with pytest.warns(UserWarning, match="generate"):
        make(other, target, rows, tmp_path, gto_weight=0.0, max_steps=1).train()


def test_rows_that_would_leave_the_position_table_are_refused(tmp_path):
    target = tiny_target("gpt2")
    rows = written_rows(target, 4, 20)
    with pytest.raises(ValueError, match="max_length` to 509"):
        make(tiny_draft(target), target, rows, tmp_path, max_length=512)
    make(tiny_draft(target), target, rows, tmp_path, max_length=509)


def test_unknown_columns_and_a_draft_as_target_are_refused(llama, draft, rows, tmp_path):
    with pytest.raises(ValueError, match="question"):
        make(draft, llama, [{"question": "A", "answer": "B"}], tmp_path)
    with pytest.raises(TypeError, match="is a draft"):
        make(draft, tiny_draft(llama), rows, tmp_path)
    draft.config.target = {**draft.config.target, "name_or_path": "Some model (dequantized)"}
    with pytest.raises(ValueError, match="dequantized"):
        make(draft, None, rows, tmp_path)


def test_a_frozen_draft_is_refused(llama, draft, rows, tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        make(draft.requires_grad_(False), llama, rows, tmp_path)
