# SPDX-License-Identifier: Apache-2.0
"""Two ranks on gloo train as one process does, GTO term included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gto_hf import AutoDraft
from tests.tiny import tiny_draft, tiny_target


SCRIPT = Path(__file__).with_name("distributed_script.py")
ROOT = SCRIPT.parents[2]


def launch(folder, ranks, **options):
    folder.mkdir(exist_ok=True)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*start, str(SCRIPT), json.dumps({"folder": str(folder), **options})]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(ranks)]


def same_run(one, two):
    """The same parameters and the same log up to rounding."""
    for key, value in one["state"].items():
        torch.testing.assert_close(two["state"][key], value, atol=1e-5, rtol=1e-4, msg=key)
    steps = [[entry for entry in run["logs"] if "token_loss" in entry] for run in (one, two)]
    for a, b in zip(*steps, strict=True):
        assert set(a) == set(b)
        for name in set(a) - {"epoch", "train_seconds"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_two_ranks_train_as_one_process_with_the_whole_batch(tmp_path, weight):
    first, second = launch(tmp_path / "two", 2, gto_weight=weight)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    # One rank never has a group, and its third batch has nothing to train at all.
    if weight:
        assert first["logs"][0]["skipped_sequences"] == 1 and "gto/ratio" in first["logs"][0]
        assert abs(first["logs"][2]["gto/loss"]) > 0
    (one,) = launch(tmp_path / "one", 1, gto_weight=weight)
    same_run(one, first)
    # Three rows in batches of two: the row that fills up the last batch of the second rank counts for nothing. Of the one
    # row the second rank has neither a real row nor a prompt.
    for name in ("three", "one", "stream"):
        for figure in ("loss", "token_loss", "trained_tokens", "tau", "tau_chain", "decoding_rounds"):
            key = f"eval_{name}_{figure}"
            assert first["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-4), key
    assert (tmp_path / "two" / "report" / "metrics.csv").exists()


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    whole, _ = launch(tmp_path / "run", 2, **options)
    part, _ = launch(tmp_path / "run", 2, **options, resume=str(tmp_path / "run" / "checkpoint-2"))
    for key, value in whole["state"].items():
        assert torch.equal(value, part["state"][key]), key
    assert whole["tokens"] == part["tokens"]


def zero(stage):
    """What `examples/accelerate/zero*.yaml` amounts to, without compiled optimizers."""
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def saved(folder):
    """The tensors of a saved draft or adapter."""
    name = "model.safetensors" if (folder / "model.safetensors").exists() else "adapter_model.safetensors"
    return load_file(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("stage, lora", [(2, False), (3, False), (3, True)])
def test_deepspeed_trains_saves_and_resumes_as_one_process_does(tmp_path, stage, lora):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (CPU: DS_BUILD_OPS=0 pip install deepspeed)")
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    options = {"target": str(tmp_path / "target"), "lora": lora}
    (one,) = launch(tmp_path / "one", 1, **options)
    options |= {"deepspeed": zero(stage), "save_strategy": "steps", "save_steps": 2}
    # A fresh draft from a target that is split already, or (with an adapter) a loaded one.
    start = {"draft": str(tmp_path / "draft")} if lora else {}
    two, _ = launch(tmp_path / "two", 2, **options, **start)
    steps = [[entry for entry in run["logs"] if "token_loss" in entry] for run in (one, two)]
    for a, b in zip(*steps, strict=True):
        for name in ("token_loss", "gto/loss", "reward/draft", "trained_tokens", "gto/target_nodes", "num_tokens"):
            assert (name in a) == (name in b) and a.get(name) == pytest.approx(b.get(name), rel=1e-3, abs=1e-5), name
    assert abs(steps[1][2]["gto/loss"]) > 0
    expected = saved(tmp_path / "one" / "final")
    for folder in ("final", "checkpoint-3"):
        found = saved(tmp_path / "two" / folder)
        assert set(found) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4, msg=key)
    if not lora:
        AutoDraft.from_pretrained(tmp_path / "two" / "checkpoint-2", target=target)
    resumed = {**options, "draft": str(tmp_path / "draft"), "resume": str(tmp_path / "two" / "checkpoint-2")}
    launch(tmp_path / "two", 2, **resumed)
    for key, value in saved(tmp_path / "two" / "final").items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Sixteen rows: of fewer the last batch is filled up otherwise on two ranks than on one.
    "options",
    [{"lora": True}, {"gradient_accumulation_steps": 2, "count": 16}],
    ids=["lora", "accumulation"],
)
def test_two_ranks_train_as_one_process_with(tmp_path, options):
    first, second = launch(tmp_path / "two", 2, **options)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    (one,) = launch(tmp_path / "one", 1, **options)
    same_run(one, first)
    assert any(abs(entry.get("gto/loss", 0.0)) > 0 for entry in one["logs"])
