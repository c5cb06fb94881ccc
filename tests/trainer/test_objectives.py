# SPDX-License-Identifier: Apache-2.0
"""Every objective by its name, under the trainer's options."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.tiny import tiny_draft
from tests.trainer.helpers import logs_with, make, state


@pytest.mark.parametrize("objective", ["tree_kl", "membership"])
def test_whole_tree_objectives_train_without_a_reference(llama, draft, rows, tmp_path, objective):
    trainer = make(
        draft, llama, rows, tmp_path, gto_objective=objective, num_train_epochs=8, per_device_train_batch_size=4
    )
    assert trainer.reference is None
    trainer.train()
    for key in ("gto/loss", "expected_acceptance/draft", "gto/target_nodes", "skipped_sequences"):
        assert all(math.isfinite(value) for value in logs_with(trainer, key)), key
    assert not logs_with(trainer, "gto/ratio") and not logs_with(trainer, "reward/reference")
    losses, nodes = logs_with(trainer, "gto/loss"), logs_with(trainer, "gto/target_nodes")
    assert losses[-1] < losses[0] and nodes[0] < logs_with(trainer, "gto/tree_nodes")[0]


@pytest.mark.parametrize("objective", ["lk", "lk_hybrid"])
def test_token_objectives_are_chosen_by_name(llama, rows, tmp_path, objective):
    runs = {}
    for name in ("kl", objective):
        trainer = make(
            tiny_draft(llama), llama, rows, tmp_path / name, gto_weight=0.0, max_steps=2, token_objective=name
        )
        trainer.train()
        runs[name] = trainer
    assert logs_with(runs["kl"], "token_loss")[0] != logs_with(runs[objective], "token_loss")[0]
    assert any(not torch.equal(a, b) for a, b in zip(*(r.model.parameters() for r in runs.values()), strict=True))


@pytest.mark.parametrize("objective", ["gto", "tree_kl", "membership"])
@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"activation_checkpointing": True}, {"gradient_accumulation_steps": 2}]
)
def test_tree_objectives_under_the_trainers_options(llama, draft, rows, tmp_path, objective, options):
    trainer = make(
        draft, llama, rows, tmp_path, gto_objective=objective, max_steps=2, per_device_train_batch_size=2, **options
    )
    trainer.train()
    assert all(math.isfinite(value) for value in logs_with(trainer, "loss"))


@pytest.mark.parametrize("objective", ["tree_kl", "membership"])
def test_adapters_train_on_whole_trees(llama, draft, rows, tmp_path, objective):
    before = state(draft)
    trainer = make(draft, llama, rows, tmp_path, gto_objective=objective, max_steps=2, peft_config=LoraConfig(r=4))
    trainer.train()
    base = {k: v for k, v in trainer.model.get_base_model().state_dict().items() if "lora_" not in k}
    for key, value in base.items():
        assert torch.equal(value, before[key.replace(".base_layer", "")]), key
    assert any(p.grad is not None or "lora_B" in n and p.abs().sum() > 0 for n, p in trainer.model.named_parameters())


def test_step_weights_are_chosen_by_name(llama, draft, rows, tmp_path):
    losses = {}
    for weights in ("decay", "dpace"):
        trainer = make(copy.deepcopy(draft), llama, rows, tmp_path, max_steps=2, gto_weight=0.0, ttt_weights=weights)
        trainer.train()
        losses[weights] = logs_with(trainer, "token_loss")
    assert losses["decay"] != losses["dpace"] and torch.tensor(losses["dpace"]).isfinite().all()
    decayed, weighed = (
        make(
            copy.deepcopy(draft),
            llama,
            rows,
            tmp_path,
            eval_rows=Dataset.from_list(rows),
            gto_weight=0.0,
            ttt_weights=weights,
        )
        for weights in ("decay", "dpace")
    )
    assert decayed.evaluate()["eval_loss"] == weighed.evaluate()["eval_loss"]  # comparable whatever trains
    with pytest.raises(ValueError, match="ttt_weights='dpace'.*there is one"):
        make(draft, llama, rows, tmp_path, ttt_weights="dpace", ttt_steps=1)
    with pytest.raises(ValueError, match="ttt_weights='other'.*decay, dpace"):
        make(draft, llama, rows, tmp_path, ttt_weights="other")
