# SPDX-License-Identifier: Apache-2.0
"""What loggers of `report_to` are given is what the trainer logs."""

import pytest
from datasets import Dataset

from tests.tiny import written_rows
from tests.trainer.helpers import make


def written(folder):
    """`{tag: {step: value}}` of TensorBoard's files: records of a length (8 bytes), its checksum (4), an event, and its (4)."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.rglob("events.out.tfevents*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
            at += 16 + size
    return found


def test_tensorboard_gets_every_figure(llama, draft, tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    rows = written_rows(llama, 8, 24)
    trainer = make(
        draft, llama, rows, tmp_path, report_to="tensorboard", max_steps=2, per_device_train_batch_size=4,
        eval_rows=Dataset.from_list(rows[:2]), eval_strategy="steps", eval_steps=2, eval_prompts=1, eval_max_new_tokens=4,
    )  # fmt: skip
    trainer.train()
    found, seen = written(tmp_path), set()
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if name in ("step", "total_flos") or name.startswith("train_"):
                continue
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            assert found[tag][entry["step"]] == pytest.approx(value, rel=1e-6), tag
            seen.add(tag)
    ours = {
        "train/token_loss",
        "train/gto/ratio",
        "train/gto/clip_fraction",
        "train/reward/draft",
        "train/tau_simulated",
    }
    assert seen >= ours | {"eval/tau", "eval/tau_chain", "eval/token_loss"}
