# SPDX-License-Identifier: Apache-2.0
"""GTOTrainer as a TRL trainer: what moves, what does not, what is logged, what is refused."""

import copy
import json
import math
import pickle

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from gto_hf import AutoDraft, GTOConfig, GTOTrainer, TreeConfig
from gto_hf.decoding import as_draft
from gto_hf.gto import SequencePrefix, read_target
from tests.families import FAMILIES
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


OFF = {"report_to": "none", "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
OFF |= {"report": False, "eval_prompts": 0}  # both have tests of their own
SMALL = {"num_groups": 2, "group_size": 3, "tree_depth": 3, "tree_top_k": 3, "tree_total_tokens": 8}


@pytest.fixture
def rows(llama):
    return written_rows(llama, 8, 24)


def make(draft, target, rows, folder, *, cls=GTOTrainer, peft_config=None, eval_rows=None, **kwargs):
    args = GTOConfig(str(folder), **{**OFF, **SMALL, "learning_rate": 1e-3, **kwargs})
    return cls(
        model=draft,
        target_model=target,
        args=args,
        train_dataset=rows if isinstance(rows, Dataset) else Dataset.from_list(rows),
        eval_dataset=eval_rows,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def logs_with(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# ---------------------------------------------------------------- what moves
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


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_accumulation_gives_the_gradient_of_the_whole_batch(llama, draft, tmp_path, weight):
    rows = written_rows(llama, 4, 26)
    for i, row in enumerate(rows):  # unequal lengths
        rows[i] = {k: v[: 26 - 5 * i] for k, v in row.items()}
    moved = copy.deepcopy(draft)
    grads = []
    for size, steps in ((4, 1), (1, 4), (2, 2)):
        trainer = make(
            copy.deepcopy(moved), llama, rows, tmp_path, cls=_Gradients, per_device_train_batch_size=size,
            gradient_accumulation_steps=steps, max_steps=1, gto_weight=weight, num_groups=2,
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


# ---------------------------------------------------------------- LoRA
def test_lora_moves_the_adapter_only_and_starts_at_the_reference(llama, draft, rows, tmp_path):
    draft.save_pretrained(tmp_path / "base")
    draft = AutoDraft.from_pretrained(tmp_path / "base")
    before = state(draft)
    trainer = make(
        draft, llama, rows, tmp_path / "out", peft_config=LoraConfig(r=4, lora_dropout=0.1), max_steps=3,
        learning_rate=1e-2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model, PeftModel)
    first = trainer.state.log_history[0]
    assert first["gto/ratio"] == 1.0 and first["gto/advantage_abs"] == 0.0
    after = {k.replace(".base_layer", ""): v for k, v in draft.state_dict().items() if "lora_" not in k}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert any(v.abs().sum() > 0 for k, v in draft.state_dict().items() if "lora_B" in k)
    # Saved, reloaded on the base, merged: the same draft as the trained one. Texts would be equal for any draft.
    trainer.save_model()
    assert "library_name: peft" in _card(trainer)
    loaded = PeftModel.from_pretrained(AutoDraft.from_pretrained(tmp_path / "base"), tmp_path / "out")
    prompt = torch.randint(3, 64, (1, 6))
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "return_dict_in_generate": True}
    mine = llama.generate(prompt, assistant_model=trainer.model, **kwargs)
    theirs = llama.generate(prompt, assistant_model=loaded, **kwargs)
    assert torch.equal(mine.sequences, theirs.sequences) and mine.statistics == theirs.statistics
    scores = _scores(trainer.model, llama, rows)
    assert torch.equal(_scores(loaded, llama, rows), scores)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(_scores(merged, llama, rows), scores, atol=1e-4, rtol=1e-4)
    base = _scores(AutoDraft.from_pretrained(tmp_path / "base"), llama, rows)
    assert (base - scores).abs().max() > 0.05  # and not that of the draft it started from
    assert llama.generate(prompt, assistant_model=merged, **kwargs).statistics == mine.statistics


def _scores(model, target, rows):
    """What a draft says at every position of some rows."""
    draft = as_draft(model).eval()
    draft.attach(target)
    ids = torch.tensor([row["input_ids"] for row in rows])
    reading = read_target(target, ids, torch.ones_like(ids), draft.config.feature_layers, 1, 2, use_cache=False)
    with torch.no_grad():
        return draft.head(SequencePrefix(draft, reading.sequences).outputs)


def _card(trainer):
    trainer.create_model_card()
    with open(f"{trainer.args.output_dir}/README.md") as file:
        return file.read()


def test_an_adapter_that_is_trained_already_is_part_of_the_reference(llama, draft, rows, tmp_path):
    wrapped = get_peft_model(draft, LoraConfig(r=2, target_modules=["fc", "q_proj"], init_lora_weights=False))
    trainer = make(wrapped, llama, rows, tmp_path, max_steps=2, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.state.log_history[0]["gto/ratio"] == 1.0
    assert trainer.state.log_history[0]["gto/advantage_abs"] == 0.0


@pytest.mark.parametrize(
    "config, words",
    [
        (LoraConfig(r=2, bias="all"), "bias"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "prompt"),
    ],
)
def test_adapters_that_would_move_the_reference_are_refused(llama, draft, rows, tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        make(draft, llama, rows, tmp_path, peft_config=config)


# ---------------------------------------------------------------- bad input
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


def test_the_trained_length_is_that_of_the_longest_row(llama, draft, rows, tmp_path):
    make(draft, llama, rows, tmp_path, max_length=500)
    assert draft.config.trained_length == 24


def test_a_frozen_draft_is_refused(llama, draft, rows, tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        make(draft.requires_grad_(False), llama, rows, tmp_path)


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


# ---------------------------------------------------------------- other objectives
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


def test_dropout_is_off_in_fresh_adapters_too(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, max_steps=1, peft_config=LoraConfig(r=4, lora_dropout=0.3))
    trainer.train()
    assert logs_with(trainer, "gto/ratio") == [1.0] and logs_with(trainer, "gto/advantage_abs") == [0.0]
    assert all(m.p == 0 for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))


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
