# SPDX-License-Identifier: Apache-2.0
"""GTOTrainer as a TRL trainer: what moves, what does not, what is logged and kept."""

import copy
import json
import math
import pickle

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from gto_hf import AutoDraft, GTOConfig, GTOTrainer, TreeConfig
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows
from tests.trainer.helpers import OFF, SMALL, logs_with, make, state


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_draft_moves_and_the_target_does_not(llama, draft, rows, tmp_path, weight, checkpointing):
    before, target_before = state(draft), state(llama)
    trainer = make(
        draft, llama, rows, tmp_path, gto_weight=weight, max_steps=3, activation_checkpointing=checkpointing,
        per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    moved = {k for k, v in draft.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {k for k, _ in draft.named_parameters()}  # every parameter, no buffer
    assert all(torch.equal(v, target_before[k]) for k, v in llama.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in llama.parameters())
    assert "forward" not in draft.__dict__  # the draft comes back as it went in


def test_loss_falls_and_acceptance_rises(llama, draft, tmp_path):
    rows = written_rows(llama, 16, 40)
    trainer = make(
        draft, llama, rows, tmp_path, gto_weight=0.0, max_steps=100, per_device_train_batch_size=8, learning_rate=3e-3
    )
    trainer.train()
    losses, taus = logs_with(trainer, "token_loss"), logs_with(trainer, "tau_simulated")
    # The loss cannot fall below the entropy of this nearly random target, so the margin is in nats.
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    assert sum(taus[-5:]) > sum(taus[:5])


def test_every_logged_quantity_is_there_and_finite(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, max_steps=2, per_device_train_batch_size=2)
    trainer.train()
    expected = {
        "token_loss", "accuracy/step_0", "accuracy/step_2", "tau_simulated", "reward/draft", "reward/reference",
        "expected_acceptance/draft", "expected_acceptance/reference", "accepted_length", "gto/advantage_abs",
        "gto/ratio", "gto/clip_fraction", "gto/loss", "gto/target_nodes", "gto/tree_nodes", "skipped_sequences", "trained_tokens",
        "num_tokens", "grad_norm",
    }  # fmt: skip
    for entry in trainer.state.log_history[:2]:
        assert expected <= set(entry), expected - set(entry)
        assert all(math.isfinite(v) for v in entry.values())


@pytest.mark.parametrize("bf16, dtype", [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)])
def test_the_first_step_is_at_the_reference(llama, draft, rows, tmp_path, bf16, dtype):
    target = llama.to(dtype)
    trainer = make(draft, target, rows, tmp_path, max_steps=3, bf16=bf16, per_device_train_batch_size=4)
    trainer.train()
    first, *later = trainer.state.log_history[:3]
    assert first["gto/ratio"] == 1.0 and first["gto/advantage_abs"] == 0.0 and first["gto/loss"] == 0.0
    assert first["reward/draft"] == first["reward/reference"]
    assert any(entry["gto/advantage_abs"] > 0 for entry in later)


def test_groups_of_one_and_zero_weight_are_the_same_control(llama, draft, rows, tmp_path):
    drafts = []
    for kwargs in ({"gto_weight": 0.0}, {"group_size": 1}):
        other = copy.deepcopy(draft)
        make(other, llama, rows, tmp_path, max_steps=3, per_device_train_batch_size=2, **kwargs).train()
        drafts.append(state(other))
    for key, value in drafts[0].items():
        torch.testing.assert_close(value, drafts[1][key], atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- normalisers
class _Gradients(GTOTrainer):
    """Keeps the gradient of the first optimizer step."""

    def _clip_grad_norm(self, model):
        self.grads = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        return super()._clip_grad_norm(model)


@pytest.mark.parametrize(
    "weight, options", [(0.0, {}), (0.0, {"ttt_weights": "dpace"}), (0.5, {}), (0.5, {"gto_path": "sample"})]
)
def test_accumulation_gives_the_gradient_of_the_whole_batch(llama, draft, tmp_path, weight, options):
    rows = written_rows(llama, 4, 26)
    for i, row in enumerate(rows):  # unequal lengths
        rows[i] = {k: v[: 26 - 5 * i] for k, v in row.items()}
    moved = copy.deepcopy(draft)
    grads = []
    for size, steps in ((4, 1), (1, 4), (2, 2)):
        trainer = make(
            copy.deepcopy(moved), llama, rows, tmp_path, cls=_Gradients, per_device_train_batch_size=size,
            gradient_accumulation_steps=steps, max_steps=1, gto_weight=weight, num_groups=2, **options,
        )  # fmt: skip
        if weight:  # away from the reference, or the GTO gradient would be zero
            torch.manual_seed(7)
            for p in trainer.model.parameters():
                p.data.add_(torch.randn_like(p) * 0.05)
        trainer.train()
        assert "grads" in trainer.__dict__
        grads.append(trainer.grads)
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(grad, other[name], atol=1e-5, rtol=1e-3, msg=name)


# ---------------------------------------------------------------- save, resume, evaluate
def test_resume_continues_bit_for_bit(llama, draft, rows, tmp_path):
    whole, part = copy.deepcopy(draft), copy.deepcopy(draft)
    kwargs = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    make(whole, llama, rows, tmp_path / "a", max_steps=4, **kwargs).train()
    trainer = make(part, llama, rows, tmp_path / "a", max_steps=4, **kwargs)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for key, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[key]), key


def test_every_checkpoint_is_a_loadable_draft_without_the_target(llama, draft, rows, tmp_path):
    trainer = make(
        draft, llama, rows, tmp_path, max_steps=2, save_strategy="steps", save_steps=1, per_device_train_batch_size=2,
        hub_token="hf_secret",
    )  # fmt: skip
    trainer.train()
    for folder in ("checkpoint-1", "checkpoint-2"):
        again = AutoDraft.from_pretrained(tmp_path / folder, target=llama)
        assert again.tree == draft.tree  # the training tree does not replace the decoding tree
        assert not any("model." in key for key in load_file(tmp_path / folder / "model.safetensors"))
        assert b"hf_secret" not in (tmp_path / folder / "training_args.bin").read_bytes()
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight)
    card = (tmp_path / "README.md").read_text()
    assert "eagle3" in card and "2509.22134" in card and "not been measured" in card


def test_evaluation_logs_under_each_datasets_name(llama, draft, rows, tmp_path):
    eval_rows = {"one": Dataset.from_list(rows[:3]), "two": Dataset.from_list(rows[3:])}
    trainer = make(draft, llama, rows, tmp_path, eval_rows=eval_rows, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_one_loss", "eval_two_loss", "eval_one_tau_simulated", "eval_two_reward/draft"} <= set(metrics)
    assert metrics["eval_one_token_loss"] != metrics["eval_two_token_loss"]
    again = trainer.evaluate()
    assert again["eval_one_token_loss"] == metrics["eval_one_token_loss"]


def test_a_loaded_drafts_vocabulary_is_never_rebuilt(llama, draft, rows, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    before = state(draft)
    trainer = make(str(tmp_path / "draft"), llama, rows, tmp_path, max_steps=1, learning_rate=0.0)
    trainer.train()
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_loaded_drafts_rope_and_norms_are_its_own_not_the_targets(llama, draft, rows, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["rms_norm_eps"] == llama.config.rms_norm_eps
    # a published draft that was trained with another RoPE and epsilon than its target has
    config |= {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rms_norm_eps": 1e-3}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    trainer = make(str(tmp_path / "draft"), llama, rows, tmp_path / "out", max_steps=1, per_device_train_batch_size=8)
    trainer.train()
    trainer.save_model()
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {"trained_length", "use_cache", "transformers_version", "pad_token_id"}  # what a run may write
    assert after["target"].pop("tokenizer")  # which text the rows were made with is written too
    config["target"].pop("tokenizer", None)
    assert {k: v for k, v in after.items() if k not in kept} == {k: v for k, v in config.items() if k not in kept}
    again = AutoDraft.from_pretrained(tmp_path / "out")
    assert torch.equal(again.d2t, draft.d2t) and torch.equal(again.t2d, draft.t2d)
    norms = {m.eps for m in again.modules() if isinstance(m, torch.nn.RMSNorm)}
    assert norms == {1e-3}
    frequencies = [b for name, b in again.named_buffers() if name.split(".")[-1] == "inv_freq"]
    assert len(frequencies) == 1 and frequencies[0][0] == 0.5  # linear scaling by 2
    assert torch.allclose(frequencies[0][1], torch.tensor(0.5 * 5e5 ** (-1 / 4)))


def test_a_draft_that_is_trained_for_a_moved_target_says_so(llama, draft, rows, tmp_path):
    draft.config.target = {**draft.config.target, "name_or_path": "org/old"}
    make(draft, llama, rows, tmp_path)  # a target without a name may be the old one
    assert draft.config.target["name_or_path"] == "org/old"
    moved = tiny_target(seed=3)
    moved.config._name_or_path = "org/moved"
    with pytest.warns(UserWarning, match="org/old"):
        trainer = make(draft, moved, rows, tmp_path, max_steps=1)
    trainer.save_model()
    assert AutoDraft.from_pretrained(tmp_path).config.target["name_or_path"] == "org/moved"


@pytest.mark.parametrize(
    "dataset",
    [
        [{"messages": [{"role": "user", "content": "ABCDEF"}, {"role": "assistant", "content": "GHIJKLMNOPQRSTU"}]}],
        [{"prompt": "ABCDEF", "completion": "GHIJKLMNOPQRSTU"}],
        [{"text": "ABCDEFGHIJKLMNOPQRSTU"}],
    ],
)
def test_the_dataset_formats_of_trl_work(llama, draft, tmp_path, dataset):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    args = GTOConfig(str(tmp_path), max_steps=1, **OFF, **SMALL)
    trainer = GTOTrainer(draft, llama, args, train_dataset=Dataset.from_list(dataset * 4), processing_class=tokenizer)
    trainer.train()
    trained = logs_with(trainer, "trained_tokens")[0] / 4
    assert trained == (16 if "prompt" in dataset[0] else {"messages": 15, "text": 20}[next(iter(dataset[0]))])


def test_every_rank_logs_the_same_names_whatever_its_batches_hold():
    class One:
        device = "cpu"
        sizes = []

        def reduce(self, tensor, reduction):
            self.sizes.append(len(tensor))
            return tensor

    from gto_hf.trainer.logs import logged_names
    from gto_hf.trainer.sums import Sums

    full, empty = (Sums(*logged_names(3, "gto")) for _ in range(2))
    full.mean("gto/ratio", 3.0, 2)
    full.total("trained_tokens", 5)
    logs = full.pop(One())
    assert logs["gto/ratio"] == 1.5 and logs["trained_tokens"] == 5 and "token_loss" not in logs
    assert empty.pop(One()) == {} and full.pop(One()) == {}
    assert len(set(One.sizes)) == 1


def test_the_config_survives_json_and_pickle_without_the_token(tmp_path):
    args = GTOConfig(str(tmp_path), hub_token="hf_secret", target_model_init_kwargs='{"dtype": "bfloat16"}', **OFF)
    assert args.target_model_init_kwargs == {"dtype": "bfloat16"}
    assert pickle.loads(pickle.dumps(args)).hub_token is None
    assert json.loads(args.to_json_string())["gto_weight"] == 0.5
    assert args.tree(TreeConfig(4, 5, 20)) == TreeConfig(4, 5, 20)


def test_other_architectures_train(tmp_path):
    for arch in ("qwen3", "gpt2"):
        target = tiny_target(arch)
        trainer = make(tiny_draft(target), target, written_rows(target, 4, 20), tmp_path, max_steps=2, max_length=64)
        trainer.train()
        assert trainer.state.log_history[0]["gto/ratio"] == 1.0


def test_the_trained_length_is_that_of_the_longest_row(llama, draft, rows, tmp_path):
    make(draft, llama, rows, tmp_path, max_length=500)
    assert draft.config.trained_length == 24


def test_padding_on_the_left_trains_the_same_tokens(llama, rows, tmp_path):
    uneven = [{"input_ids": r["input_ids"][: 20 - i], "labels": r["input_ids"][: 20 - i]} for i, r in enumerate(rows)]

    def left(examples):
        width = max(len(e["input_ids"]) for e in examples)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        examples = [{**e, "attention_mask": [1] * len(e["input_ids"])} for e in examples]
        return {k: torch.tensor([[v] * (width - len(e[k])) + list(e[k]) for e in examples]) for k, v in fill.items()}

    logs = []
    for name, collator in (("right", None), ("left", left)):
        trainer = make(tiny_draft(llama), llama, uneven, tmp_path / name, max_steps=2, per_device_train_batch_size=4)
        if collator is not None:
            trainer.data_collator = collator
        trainer.train()
        logs.append(trainer)
    for key in ("trained_tokens", "token_loss", "gto/tree_nodes", "reward/draft"):
        assert logs_with(logs[0], key) == pytest.approx(logs_with(logs[1], key), rel=1e-4), key


def test_evaluation_takes_the_same_groups_at_every_step(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, eval_rows=Dataset.from_list(rows[:4]))
    losses = []
    for step in (0, 7):
        trainer.state.global_step = step
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]
