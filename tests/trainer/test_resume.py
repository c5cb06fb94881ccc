# SPDX-License-Identifier: Apache-2.0
"""Resuming: bit for bit, from complete checkpoints only, against the reference of the run's start."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from gto_hf import AutoDraft, GTOConfig, GTOTrainer
from gto_hf.trainer.resume import checkpoints, problem
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows

from .resume_script import make as make_killed


ROOT = Path(__file__).parents[2]
NEEDED = ["rng_state.pth", "optimizer.pt", "scheduler.pt"]


def make(draft, folder, *, peft_config=None, **kwargs):
    """A run of two epochs of four steps, of two micro-batches each; it saves in the middle of an epoch."""
    target = tiny_target()
    options = {
        "num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "num_groups": 2, "group_size": 3, "tree_depth": 3,
        "tree_top_k": 3, "tree_total_tokens": 8, "bf16": False, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = GTOConfig(str(folder), **{**options, **kwargs})
    rows = Dataset.from_list(written_rows(target, 16, 24))
    return GTOTrainer(
        draft, target, args, train_dataset=rows, processing_class=tiny_tokenizer(), peft_config=peft_config
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a finished run and its checkpoints, the starting draft, the log and the trained parameters."""
    folder = tmp_path_factory.mktemp("run")
    start = tiny_draft(tiny_target())
    draft = copy.deepcopy(start)
    trainer = make(draft, folder)
    trainer.train()
    return folder, start, trainer.state.log_history, draft.state_dict()


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run's folder that a test may damage, and a fresh copy of the starting draft."""
    shutil.copytree(run[0], tmp_path / "run")
    return tmp_path / "run", copy.deepcopy(run[1])


def without_time(log):
    return [{k: v for k, v in entry.items() if "runtime" not in k and "second" not in k} for entry in log]


# ---------------------------------------------------------------- bit for bit
def test_a_resumed_run_ends_as_the_uninterrupted_one(run, own):
    _, _, log, state = run
    folder, draft = own
    trainer = make(draft, folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    for key, value in state.items():
        assert torch.equal(value, draft.state_dict()[key]), key
    # The losses, rewards and counts of the steps after the checkpoint too, with the tokens of the whole run.
    assert without_time(trainer.state.log_history)[:8] == without_time(log)[:8]
    assert any(entry["gto/advantage_abs"] > 0 for entry in log[3:8])
    assert log[7]["num_tokens"] == 2 * 16 * 24


@pytest.mark.parametrize(
    "kept, killed", [("group_positions", False), ("group_positions", True), ("features_path", False)]
)
def test_a_run_that_keeps_answers_on_disk_resumes_bit_for_bit(tmp_path, kept, killed):
    """After a kill the folder holds what was there at the checkpoint, else rows of later steps as well."""
    start = tiny_draft(tiny_target())
    folder, store = tmp_path / "run", tmp_path / "run" / "_reference-trees"
    options = {"group_positions": "grid"}
    if kept == "features_path":
        store = tmp_path / "features"
        options = {"gto_weight": 0.0, "features_path": str(store)}
    drafts, logs, checkpoint = [], [], str(folder / "checkpoint-3")
    for resumed in (False, True):
        drafts.append(copy.deepcopy(start))
        trainer = make(drafts[-1], folder, **options)
        if resumed and killed:
            for shard in sorted(store.glob("*.safetensors"), key=os.path.getmtime)[1:]:
                shard.unlink()
            trainer = make(drafts[-1], folder, **options)
        trainer.train(resume_from_checkpoint=checkpoint if resumed else None)
        logs.append(without_time(trainer.state.log_history)[:8])
        assert len(list(store.glob("*.safetensors"))) > 1
    for key, value in drafts[0].state_dict().items():
        assert torch.equal(value, drafts[1].state_dict()[key]), key
    # A row of M0's trees that is there needs no target forward: that count alone tells the runs apart.
    saved = [[entry.pop("gto/target_nodes", None) for entry in log] for log in logs]
    if kept == "group_positions" and not killed:  # nodes of later rows were scored in a forward of another shape
        logs = [[pytest.approx(entry, rel=1e-6) for entry in logs[0]], logs[1]]
    assert logs[0] == logs[1]
    if kept == "group_positions":
        assert (saved[0] == saved[1]) == killed


def test_a_resumed_adapter_ends_as_the_uninterrupted_one(tmp_path):
    start = tiny_draft(tiny_target())
    start.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, lora_dropout=0.1)
    whole = make(AutoDraft.from_pretrained(tmp_path / "base"), tmp_path / "a", peft_config=config)
    whole.train()
    part = make(AutoDraft.from_pretrained(tmp_path / "base"), tmp_path / "a", peft_config=config)
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    expected = whole.model.state_dict()
    for key, value in part.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert without_time(part.state.log_history)[:8] == without_time(whole.state.log_history)[:8]
    # Every checkpoint is an adapter for the draft it started from, without a tensor of draft or target.
    for folder in checkpoints(str(tmp_path / "a")):
        loaded = PeftModel.from_pretrained(AutoDraft.from_pretrained(tmp_path / "base"), folder)
        assert any(bool(v.any()) for k, v in loaded.state_dict().items() if "lora_B" in k)
        assert all("lora_" in key for key in load_file(folder / "adapter_model.safetensors"))


# ---------------------------------------------------------------- the reference
def test_a_checkpoint_given_as_model_is_refused_on_resuming(own):
    folder, draft = own
    trainer = make(AutoDraft.from_pretrained(folder / "checkpoint-3"), folder)
    with pytest.raises(ValueError, match="checkpoint-8.*started from"):
        trainer.train(resume_from_checkpoint=True)
    # Without resuming it is a new run, and without GTO there is no reference to be wrong.
    make(AutoDraft.from_pretrained(folder / "checkpoint-3"), folder, max_steps=1).train()
    make(AutoDraft.from_pretrained(folder / "checkpoint-3"), folder, gto_weight=0.0).train(True)


def test_a_checkpoint_without_a_reference_is_resumed_with_a_warning(own):
    folder, draft = own
    for path in folder.rglob("gto_state.json"):
        path.unlink()
    with pytest.warns(UserWarning, match="records no reference"):
        make(draft, folder).train(resume_from_checkpoint=True)


# ---------------------------------------------------------------- unfinished checkpoints
def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [Path.unlink, cut, empty])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_damaged_files_are_named(own, name, damage):
    folder = own[0] / "checkpoint-3"
    assert problem(folder, NEEDED) is None
    damage(folder / name)
    assert name in problem(folder, NEEDED)


def test_other_damage_is_named_too(own):
    folder = own[0] / "checkpoint-3"
    cut(folder / "config.json")
    assert "config.json" in problem(folder, NEEDED)
    assert "no such folder" in problem(own[0] / "checkpoint-99", NEEDED)
    assert "scaler.pt" in problem(own[0] / "checkpoint-6", [*NEEDED, "scaler.pt"])
    shards = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (own[0] / "checkpoint-6" / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert "model-00001-of-00002.safetensors is missing" in problem(own[0] / "checkpoint-6", NEEDED)


def test_the_newest_complete_checkpoint_is_found(run, own):
    folder, draft = own
    cut(folder / "checkpoint-8" / "model.safetensors")
    (folder / "checkpoint-6" / "optimizer.pt").unlink()
    trainer = make(draft, folder)
    with pytest.warns(UserWarning, match="Unfinished") as caught:
        trainer.train(resume_from_checkpoint=True)
    (warning,) = [str(w.message) for w in caught if "Unfinished" in str(w.message)]
    assert "checkpoint-8: model.safetensors is cut" in warning and "checkpoint-6: optimizer.pt is missing" in warning
    assert "from checkpoint-3" in warning
    for key, value in run[3].items():  # nothing was lost
        assert torch.equal(value, draft.state_dict()[key]), key
    assert all(problem(path, NEEDED) is None for path in checkpoints(str(folder)))


def test_a_broken_checkpoint_that_is_asked_for_is_an_error(own):
    folder, draft = own
    cut(folder / "checkpoint-6" / "optimizer.pt")
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    trainer = make(draft, folder)
    with pytest.raises(ValueError, match="checkpoint-6.*optimizer.pt is cut"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    for path in checkpoints(str(folder)):
        (path / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-8: trainer_state.json.*checkpoint-3"):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())
    trainer.args.output_dir = str(folder / "nowhere")
    with pytest.raises(ValueError, match="There is no checkpoint"):
        trainer.train(resume_from_checkpoint="True")


def test_a_checkpoint_that_is_written_again_is_unfinished_meanwhile(own, monkeypatch):
    folder, draft = own
    trainer = make(draft, folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint(trainer.model, None)
    assert "last file" in problem(folder / "checkpoint-8", NEEDED)


def test_a_killed_run_goes_on(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trainer.resume_script", str(tmp_path)]
    child = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Killed between the weights and the trainer's state of a checkpoint, if the child is not faster than this loop.
        while not (tmp_path / "checkpoint-4" / "model.safetensors").exists():
            assert child.poll() is None
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    found = checkpoints(str(tmp_path))
    complete = [path for path in found if problem(path, NEEDED) is None]
    assert len(complete) >= 3 and len(found) - len(complete) <= 1
    for path in complete:
        AutoDraft.from_pretrained(path)
    newest = int(complete[0].name.split("-")[1])
    trainer = make_killed(str(tmp_path), newest + 2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == newest + 2
    assert all(problem(path, NEEDED) is None for path in checkpoints(str(tmp_path)))
