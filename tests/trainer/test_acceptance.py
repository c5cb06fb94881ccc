# SPDX-License-Identifier: Apache-2.0
"""Acceptance length in evaluation: the figures of the decoding loop, best model by tau, and a training left as it was."""

import copy
import gc
import math
import types

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import Cache, EarlyStoppingCallback
from transformers.trainer_pt_utils import IterableDatasetShard as StreamShard

import gto_hf.trainer.acceptance as module
from gto_hf import AutoDraft, CausalLMDraft, DecodingStatistics, GTOConfig, TreeConfig, misalignment, record_rounds
from gto_hf.trainer.acceptance import Acceptance, held_out_prompts
from gto_hf.trainer.forward import without_repeats
from tests.families import FAMILIES
from tests.tiny import memorised_rows, tiny_draft, tiny_target, train_tiny, written_rows
from tests.trainer.helpers import logs_with, make, state


DECODE = {"eval_prompts": 3, "eval_max_new_tokens": 10}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 1, **DECODE}
NEW = 10


@pytest.fixture(scope="module")
def known():
    """A target, a draft that knows some of its texts, and these texts as rows."""
    target = tiny_target()
    rows, _ = memorised_rows(target, count=4, length=24)
    draft = tiny_draft(target, vocab=60)
    train_tiny(draft, target, rows, steps=60)
    return target, draft, rows


@pytest.fixture
def rows(llama):
    return written_rows(llama, 6, 20)


def loader(rows):
    """Batches of one row each, as tensors."""

    def collate(batch):
        return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}

    rows = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in rows]
    return DataLoader(rows, batch_size=1, collate_fn=collate)


def decoded(target, draft, tree, prompts, **kwargs):
    """Counts and rounds of plain `generate` calls."""
    own, statistics = copy.deepcopy(draft).attach(target), DecodingStatistics()
    own.tree = tree
    with record_rounds() as recorder:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=own, max_new_tokens=NEW, do_sample=False,
                return_dict_in_generate=True, **kwargs,
            )  # fmt: skip
            statistics += output.statistics
    return statistics, recorder.rounds


# ---------------------------------------------------------------- figures
def test_the_figures_are_those_of_generate_on_the_prompts_of_the_rows(known, tmp_path):
    target, draft, rows = known
    trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE | {"eval_prompts": 2})
    metrics = trainer.evaluate()
    prompts = [rows[0]["input_ids"][:6], rows[2]["input_ids"][:6]]
    tree, rounds = decoded(target, draft, draft.tree, prompts)
    chain, _ = decoded(target, draft, draft.tree.chain(), prompts)
    assert metrics["eval_tau"] == tree.tau > metrics["eval_tau_chain"] == chain.tau > 1
    assert metrics["eval_decoding_rounds"] == tree.rounds == len(rounds)
    for k in range(1, draft.tree.depth + 1):
        share = sum(len(r.path) > k for r in rounds) / len(rounds)
        assert metrics[f"eval_accepted/depth_{k}"] == share
    assert metrics["eval_accepted/depth_1"] > 0 and f"eval_accepted/depth_{draft.tree.depth + 1}" not in metrics
    found = misalignment(rounds)
    for name in ("pruned", "greedy_accepted_path", "greedy_accepted", "tree_accepted"):
        assert metrics[f"eval_misalignment/{name}"] == pytest.approx(getattr(found, name))
    assert trainer.state.log_history[-1]["eval_tau"] == tree.tau  # logged, not only returned


def test_sampling_is_repeatable_and_another_thing_than_greedy(known, tmp_path):
    target, draft, rows = known
    greedy, *sampled = (
        make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), eval_temperature=t, **DECODE).evaluate()
        for t in (0.0, 1.0, 1.0)
    )
    assert sampled[0]["eval_tau"] == sampled[1]["eval_tau"] != greedy["eval_tau"]


def test_every_dataset_has_its_own_figures_and_predict_has_them_too(known, tmp_path):
    target, draft, rows = known
    other = Dataset.from_list(written_rows(target, 3, 20, seed=9))
    datasets = {"one": Dataset.from_list(rows), "two": other}
    trainer = make(draft, target, rows, tmp_path, eval_rows=datasets, **DECODE)
    metrics = trainer.evaluate()
    assert metrics["eval_one_tau"] > metrics["eval_two_tau"] >= 1 and "eval_tau" not in metrics
    assert {"eval_one_tau_chain", "eval_two_accepted/depth_2", "eval_two_misalignment/pruned"} <= set(metrics)
    assert trainer.predict(datasets["two"]).metrics["test_tau"] == metrics["eval_two_tau"]


def test_a_stream_gives_its_first_rows(known, tmp_path):
    target, draft, rows = known
    stream = IterableDataset.from_generator(lambda: iter(rows))
    kwargs = DECODE | {"eval_prompts": 2}
    streamed = make(draft, target, rows, tmp_path, eval_rows=stream, **kwargs).evaluate()
    stored = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows[:2]), **kwargs).evaluate()
    assert streamed["eval_tau"] == stored["eval_tau"]
    assert streamed["eval_decoding_rounds"] == stored["eval_decoding_rounds"]


def test_an_automatic_tree_is_decoded_at_its_limits(known, tmp_path):
    target, draft, rows = known
    draft = copy.deepcopy(draft)
    taus = []
    for tree in (TreeConfig(3, 4, 12), TreeConfig(3, 4, 12, auto=True)):
        draft.tree = tree
        trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE)
        taus.append(trainer.evaluate()["eval_tau"])
        assert draft.tree == tree
    assert taus[0] == taus[1]


@pytest.mark.parametrize("bf16, dtype", [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)])
def test_mixed_precision_decodes_in_the_models_own_dtypes(rows, tmp_path, bf16, dtype):
    target = tiny_target().to(dtype)
    draft = tiny_draft(target)  # float32, as it is trained
    trainer = make(
        draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), bf16=bf16, max_steps=2, **EVALUATE
    )
    trainer.train()
    prompts = [rows[i]["input_ids"][:4] for i in (0, 2, 4)]
    assert draft.dtype == torch.float32
    assert logs_with(trainer, "eval_tau")[-1] == decoded(target, draft, draft.tree, prompts)[0].tau


def test_an_adapter_in_training_is_decoded_with(known, tmp_path):
    target, draft, rows = known
    draft = copy.deepcopy(draft)
    trainer = make(
        draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), peft_config=LoraConfig(r=4), max_steps=8,
        gto_weight=0.0, learning_rate=0.3, per_device_train_batch_size=4, **EVALUATE | {"eval_steps": 8},
    )  # fmt: skip
    before = trainer.evaluate()["eval_tau"]
    trainer.train()
    after = logs_with(trainer, "eval_tau")[-1]
    assert after < before  # such a rate ruins the draft; with the adapter off nothing would change
    with trainer.model.disable_adapter():
        assert trainer.evaluate()["eval_tau"] == before


def test_a_language_model_that_is_the_target_is_always_right(rows, tmp_path):
    target = tiny_target()
    draft = CausalLMDraft(tiny_target(), target=target)
    draft.tree = TreeConfig(depth=3, top_k=2, total_tokens=10)  # nothing is pruned
    kwargs = {"eval_prompts": 2, "eval_max_new_tokens": 9}  # one from the prefill, two rounds of three and a bonus
    target.generation_config.eos_token_id = None
    trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), gto_weight=0.0, **kwargs)
    metrics = trainer.evaluate()
    assert metrics["eval_tau"] == metrics["eval_tau_chain"] == 4 and metrics["eval_decoding_rounds"] == 4
    assert metrics["eval_accepted/depth_3"] == metrics["eval_misalignment/greedy_accepted_path"] == 1


def test_a_target_that_checks_chains_only_has_a_tau(rows, tmp_path):
    target = FAMILIES["bloom"].build()
    draft = tiny_draft(target)
    with pytest.warns(UserWarning, match="ALiBi"):
        trainer = make(draft, target, rows, tmp_path, gto_weight=0.0, eval_rows=Dataset.from_list(rows), **DECODE)
        metrics = trainer.evaluate()
    assert metrics["eval_tau"] == metrics["eval_tau_chain"] >= 1
    assert (
        metrics["eval_tau"] == decoded(target, draft, draft.tree, [rows[i]["input_ids"][:4] for i in (0, 2, 4)])[0].tau
    )


# ---------------------------------------------------------------- which prompts
def test_prompts_are_spread_shared_and_end_before_the_first_supervised_token():
    rows = [{"input_ids": [10 + i, 1, 2, 3], "labels": [-100, -100, 2, 3]} for i in range(10)]
    one = held_out_prompts(loader(rows), 4, 0, 1)
    assert one == [(0, [10, 1]), (1, [12, 1]), (2, [15, 1]), (3, [17, 1])]
    shares = [held_out_prompts(loader(rows), 4, rank, 3) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 1, 1] and sorted(sum(shares, [])) == one
    assert held_out_prompts(loader(rows[:2]), 4, 2, 3) == []  # more ranks than rows
    plain = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}
    nothing = {"input_ids": [5, 6, 7], "labels": [-100] * 3}
    padded = {"input_ids": [0, 5, 6, 7], "labels": [-100, -100, 6, 7], "attention_mask": [0, 1, 1, 1]}
    assert held_out_prompts(loader([plain, nothing, padded]), 8, 0, 1) == [(0, [5, 6]), (2, [5])]


@pytest.mark.parametrize("shard", [IterableDatasetShard, StreamShard])
def test_ranks_share_the_first_rows_of_a_stream(shard):
    rows = [{"input_ids": [10 + i, 1], "labels": [-100, 1], "attention_mask": [1, 1]} for i in range(9)]
    collate = loader([]).collate_fn

    def share(rank, world):
        dataset = shard(IterableDataset.from_generator(lambda: iter(rows)), num_processes=world, process_index=rank)
        return held_out_prompts(types.SimpleNamespace(dataset=dataset, collate_fn=collate), 5, rank, world)

    found = share(0, 2) + share(1, 2)
    assert sorted(found) == [(i, [10 + i]) for i in range(5)]
    # a stream that is split by its files gives every rank the first rows of its own part
    own = types.SimpleNamespace(dataset=IterableDataset.from_generator(lambda: iter(rows)), collate_fn=collate)
    assert [prompt for _, prompt in held_out_prompts(own, 5, 1, 2)] == [[10], [11]]


# ---------------------------------------------------------------- best model
TAUS = [1.2, 1.5, 1.4, 1.3, 1.6]


@pytest.fixture
def told(monkeypatch):
    """Evaluations that find `TAUS`, one after the other."""
    taus = iter(TAUS)
    monkeypatch.setattr(Acceptance, "measure", lambda *args: {"tau": next(taus)})


BEST = {"metric_for_best_model": "tau", "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}


def test_the_best_model_is_the_one_with_the_highest_tau(llama, draft, rows, tmp_path, told):
    trainer = make(draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), max_steps=4, **EVALUATE, **BEST)
    assert trainer.args.greater_is_better
    trainer.train()
    assert trainer.state.best_global_step == 2 and trainer.state.best_metric == 1.5
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best, last = (AutoDraft.from_pretrained(tmp_path / f"checkpoint-{n}") for n in (2, 4))
    assert torch.equal(draft.lm_head.weight, best.lm_head.weight)
    assert not torch.equal(best.lm_head.weight, last.lm_head.weight)


def test_early_stopping_follows_tau(llama, draft, rows, tmp_path, told):
    trainer = make(draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), max_steps=5, **EVALUATE, **BEST)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert logs_with(trainer, "eval_tau") == TAUS[:4] and trainer.state.best_global_step == 2


def test_a_real_run_keeps_the_draft_that_was_measured_best(known, tmp_path):
    target, draft, rows = known
    draft = copy.deepcopy(draft)
    trainer = make(
        draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), max_steps=3, gto_weight=0.0,
        learning_rate=0.05, per_device_train_batch_size=4, **EVALUATE, **BEST,
    )  # fmt: skip
    trainer.train()
    taus = logs_with(trainer, "eval_tau")
    assert trainer.state.best_global_step == 1 + taus.index(max(taus)) and len(set(taus)) > 1
    assert trainer.evaluate()["eval_tau"] == max(taus)  # the loaded draft decodes as it did then


# ---------------------------------------------------------------- what it leaves behind
def test_evaluating_does_not_change_training(llama, draft, rows, tmp_path):
    states = []
    sampled = {"eval_temperature": 1.0, **EVALUATE}
    for kwargs in ({}, sampled, sampled | {"eval_prompts": 0}):
        other = copy.deepcopy(draft)
        trainer = make(
            other, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), max_steps=3,
            peft_config=LoraConfig(r=4, lora_dropout=0.5), per_device_train_batch_size=2, gto_path="sample", **kwargs,
        )  # fmt: skip
        trainer.train()
        states.append(state(other))
    for other in states[1:]:
        for key, value in states[0].items():
            assert torch.equal(value, other[key]), key


def test_nothing_stays_behind(known, tmp_path):
    target, draft, rows = known
    trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE)
    before, modes, attention = draft.tree, draft.training, target.config._attn_implementation
    trainer.evaluate()
    gc.collect()
    assert not [o for o in gc.get_objects() if issubclass(type(o), Cache)]
    assert draft.tree == before and draft.training == modes and target.config._attn_implementation == attention
    assert not any(p.requires_grad for p in target.parameters()) and all(p.requires_grad for p in draft.parameters())
    assert not any(t.is_inference() for m in (draft, target) for t in (*m.parameters(), *m.buffers()))


def test_a_failure_leaves_the_drafts_tree_alone(known, tmp_path, monkeypatch):
    target, draft, rows = known
    trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE)
    before = draft.tree
    monkeypatch.setattr(module, "misalignment", lambda rounds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    draft.tree = before.chain()
    monkeypatch.undo()
    trainer.evaluate()
    assert draft.tree == before.chain()
    draft.tree = before


# ---------------------------------------------------------------- what cannot be measured
def test_bad_options_are_refused_by_name(tmp_path):
    for name, value in (("eval_prompts", -1), ("eval_max_new_tokens", 1), ("eval_temperature", -0.5)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            GTOConfig(str(tmp_path), report_to="none", bf16=False, **{name: value})


def test_a_metric_that_will_not_be_measured_is_refused_at_the_start(llama, draft, rows, tmp_path):
    for metric in ("tau", "eval_tau_chain", "eval_held_out_tau"):
        with pytest.raises(ValueError, match="eval_prompts=0"):
            make(draft, llama, rows, tmp_path, metric_for_best_model=metric)
    trainer = make(
        draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), metric_for_best_model="tau_simulated"
    )
    assert "eval_tau" not in trainer.evaluate()


def test_sharded_models_decode_nothing_and_say_so_once(llama, draft, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_deepspeed_zero3_enabled", lambda: True)
    trainer = make(draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE)
    with pytest.warns(UserWarning, match="ZeRO-3") as record:
        metrics = [trainer.evaluate() for _ in range(2)]
    assert len([w for w in record if "ZeRO-3" in str(w.message)]) == 1
    assert all("eval_loss" in m and "eval_tau" not in m for m in metrics)


def test_a_target_that_nothing_can_be_decoded_with_is_named(llama, draft, rows, tmp_path, monkeypatch):
    def refuse(*args):
        raise ValueError("Mamba keeps a recurrent state")

    monkeypatch.setattr(module, "check_mode", refuse)
    with pytest.raises(ValueError, match="tau.*recurrent state"):
        make(draft, llama, rows, tmp_path, metric_for_best_model="tau", **DECODE)
    trainer = make(draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows), **DECODE)
    with pytest.warns(UserWarning, match="recurrent state"):
        assert "eval_tau" not in trainer.evaluate()


def test_prompts_without_room_and_refused_requests_are_a_warning_and_nan(rows, tmp_path):
    target = tiny_target("gpt2")  # 512 positions
    draft = tiny_draft(target)
    long = Dataset.from_list([{"input_ids": [5] * 512, "labels": [-100] * 511 + [5]}])
    kwargs = {**DECODE, "gto_weight": 0.0}
    trainer = make(draft, target, rows, tmp_path, eval_rows=long, **kwargs)
    with pytest.warns(UserWarning, match="decoded no prompts"):
        metrics = trainer.evaluate()
    assert math.isnan(metrics["eval_tau"]) and metrics["eval_decoding_rounds"] == 0
    target.generation_config.cache_implementation = "quantized"
    trainer = make(draft, target, rows, tmp_path, eval_rows=Dataset.from_list(rows), **kwargs)
    with pytest.warns(UserWarning, match="could not decode a prompt"):
        assert math.isnan(trainer.evaluate()["eval_tau"])


# ---------------------------------------------------------------- ranks
@pytest.mark.parametrize("rank, kept", [(0, 2), (1, 1), (2, 0)])
def test_rows_that_fill_up_the_last_batch_are_left_out(rank, kept):
    def batch():
        return {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3)}

    ranks = types.SimpleNamespace(process_index=rank)
    ranks.gradient_state = types.SimpleNamespace(end_of_dataloader=True, remainder=3)
    found = without_repeats(batch(), ranks)
    assert len(found["input_ids"]) == max(kept, 1)
    assert torch.equal(found["labels"][:kept], batch()["labels"][:kept])
    assert (found["labels"][kept:] == -100).all()
    for end, remainder in ((False, 3), (True, 0), (True, -1)):
        ranks.gradient_state = types.SimpleNamespace(end_of_dataloader=end, remainder=remainder)
        assert torch.equal(without_repeats(batch(), ranks)["labels"], batch()["labels"])


def test_ranks_sum_up_to_one_process_and_an_empty_share_takes_part(known):
    target, draft, rows = known

    class Ranks:
        """What an accelerator tells; keeps what it is given to sum up."""

        device, is_main_process, distributed_type = "cpu", True, "NO"

        def __init__(self, rank, world):
            self.process_index, self.num_processes = rank, world

        def unwrap_model(self, model):
            return model

        def reduce(self, tensor, reduction):
            self.sent = tensor
            return tensor

    args = types.SimpleNamespace(
        eval_prompts=2, eval_max_new_tokens=10, eval_temperature=1.0, seed=3, metric_for_best_model=None
    )
    sent = []
    for rank, world in ((0, 1), (0, 3), (1, 3), (2, 3)):
        ranks = Ranks(rank, world)
        Acceptance(args, target, draft, ranks).measure(draft, loader(rows))
        sent.append(ranks.sent)
    assert torch.equal(sent[0], sent[1] + sent[2] + sent[3])
    assert sent[1].any() and sent[2].any() and not sent[3].any()
