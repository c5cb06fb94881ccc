# SPDX-License-Identifier: Apache-2.0
"""The report of a run: complete, rebuilt after a resume, never half written, and never in the way of training."""

import copy
import csv
import logging
import math
import struct
import sys

import pytest
from datasets import Dataset
from transformers import TrainerCallback

import gto_hf.trainer.report as module
from gto_hf.trainer.report import best_row, draw_training, merged_rows, report_table
from tests.tiny import written_rows
from tests.trainer.helpers import make


RUN = {
    "report": True, "eval_prompts": 1, "eval_max_new_tokens": 6, "eval_strategy": "steps", "eval_steps": 2,
    "max_steps": 4, "per_device_train_batch_size": 2,
}  # fmt: skip


@pytest.fixture
def rows(llama):
    return written_rows(llama, 8, 24)


def run(draft, target, rows, folder, *callbacks, resume=None, **kwargs):
    trainer = make(draft, target, rows, folder, eval_rows=Dataset.from_list(rows[:2]), **RUN | kwargs)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def read_csv(folder):
    with open(folder / "report" / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def size(path):
    """Width and height of a PNG file."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


# ---------------------------------------------------------------- files
def test_the_report_holds_every_logged_quantity_and_the_best_step(llama, draft, rows, tmp_path):
    trainer = run(draft, llama, rows, tmp_path, metric_for_best_model="tau")
    found = read_csv(tmp_path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    for entry in trainer.state.log_history:
        row = found[entry["step"] - 1]
        for name, value in entry.items():
            assert float(row[name]) == value, name
    assert "eval_tau" in found[1] and found[0]["eval_tau"] == "" and float(found[3]["train_runtime"]) > 0
    table = (tmp_path / "report" / "table.md").read_text()
    best = max((row for row in found if row["eval_tau"]), key=lambda row: float(row["eval_tau"]))
    assert f"| best step | {best['step']}, `eval_tau` {float(best['eval_tau']):.3f} |" in table
    assert f"| **{best['step']}** | **{float(best['eval_tau']):.3f}** |" in table
    assert float(best["eval_tau"]) == trainer.state.best_metric
    trained = [float(row["trained_tokens"]) for row in found]
    seconds = [float(row["train_seconds"]) for row in found]
    assert all(s > 0 for s in seconds)
    assert f"| trained tokens per second, within optimizer steps | {sum(trained) / sum(seconds):,.0f} |" in table
    assert size(tmp_path / "report" / "training.png") == (1440, 720)  # six panels
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == ["metrics.csv", "table.md", "training.png"]


def test_a_resumed_run_shows_its_whole_history(llama, draft, rows, tmp_path):
    start = copy.deepcopy(draft)
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(draft, llama, rows, tmp_path / "one", max_steps=2, **saving)
    first = read_csv(tmp_path / "one")
    # elsewhere, so that nothing but the checkpoint can tell what was before
    trainer = run(start, llama, rows, tmp_path / "two", resume=str(tmp_path / "one" / "checkpoint-2"), **saving)
    found = read_csv(tmp_path / "two")
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    for name in ("token_loss", "eval_tau", "train_seconds"):
        assert [row[name] for row in found[:2]] == [row[name] for row in first]
    assert len([e for e in trainer.state.log_history if "eval_tau" in e]) == 2
    assert "| 2 |" in (tmp_path / "two" / "report" / "table.md").read_text().replace("*", "")


def test_only_the_panels_that_exist_are_drawn(llama, draft, rows, tmp_path):
    run(draft, llama, rows, tmp_path, gto_weight=0.0, max_steps=2)
    assert size(tmp_path / "report" / "training.png") == (960, 360)  # loss and acceptance length
    draw_training([{"step": 1, "gto/ratio": 1.0}], tmp_path / "one.png")
    assert size(tmp_path / "one.png") == (480, 360)
    draw_training([{"step": 1, "learning_rate": 1.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_no_report_is_written_if_none_is_wanted(llama, draft, rows, tmp_path):
    trainer = run(draft, llama, rows, tmp_path, report=False, max_steps=1)
    assert not (tmp_path / "report").exists()
    assert not any("train_seconds" in entry for entry in trainer.state.log_history)


def test_without_matplotlib_there_are_tables_and_one_line(llama, draft, rows, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(module.logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        run(draft, llama, rows, tmp_path)
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == ["metrics.csv", "table.md"]
    assert len([r for r in caplog.records if "[draw]" in r.message]) == 1


# ---------------------------------------------------------------- what goes wrong
def test_a_report_that_cannot_be_written_does_not_end_training(llama, draft, rows, tmp_path):
    (tmp_path / "report").write_text("in the way")
    with pytest.warns(UserWarning, match="could not be written") as record:
        trainer = run(draft, llama, rows, tmp_path)
    assert trainer.state.global_step == 4
    assert len([w for w in record if "could not be written" in str(w.message)]) == 1


def test_a_failed_write_leaves_the_last_good_file(llama, draft, rows, tmp_path, monkeypatch):
    run(draft, llama, rows, tmp_path, max_steps=2)
    before = (tmp_path / "report" / "training.png").read_bytes()

    def full(rows, path):
        path.write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "draw_training", full)
    with pytest.warns(UserWarning, match="No space left"):
        run(draft, llama, rows, tmp_path)
    assert (tmp_path / "report" / "training.png").read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == ["metrics.csv", "table.md", "training.png"]
    assert len(read_csv(tmp_path)) == 4


# ---------------------------------------------------------------- trackers
def test_trackers_get_numbers_only(llama, draft, rows, tmp_path):
    class Tracker(TrainerCallback):
        """What an integration such as TensorBoard sees."""

        seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(dict(logs))

    trainer = run(draft, llama, rows, tmp_path, Tracker())
    assert len(Tracker.seen) == len(trainer.state.log_history)
    assert all(type(value) in (int, float) for logs in Tracker.seen for value in logs.values())
    assert {"eval_tau", "eval_accepted/depth_1", "eval_misalignment/pruned"} <= {
        k for logs in Tracker.seen for k in logs
    }


# ---------------------------------------------------------------- tables
HISTORY = [
    {"step": 1, "epoch": 0.5, "loss": 4.0, "trained_tokens": 100.0, "train_seconds": 2.0},
    {"step": 2, "epoch": 1.0, "loss": 3.0, "trained_tokens": 200.0, "train_seconds": 1.0},
    {"step": 2, "epoch": 1.0, "eval_a_loss": 3.5, "eval_a_tau": 1.5, "eval_a_tau_chain": 1.25},
    {"step": 2, "epoch": 1.0, "eval_b_loss": 3.6, "eval_b_tau": math.nan},
    {"step": 4, "epoch": 2.0, "eval_a_loss": 3.25, "eval_a_tau": 1.5, "eval_a_tau_chain": 1.5, "note": "text"},
]


def test_one_row_per_step_and_numbers_only():
    rows = merged_rows(HISTORY)
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert rows[1]["loss"] == 3.0 and rows[1]["eval_a_tau"] == 1.5 and "eval_b_tau" in rows[1]
    assert "note" not in rows[2] and merged_rows([]) == []


def test_the_best_row_is_the_trainers_choice():
    rows = merged_rows(HISTORY)
    assert best_row(rows, None, None) == ("eval_a_tau", rows[1])  # the first of two equal ones
    assert best_row(rows, "a_loss", False) == ("eval_a_loss", rows[2])
    assert best_row(rows, "eval_a_tau_chain", True) == ("eval_a_tau_chain", rows[2])
    assert best_row(rows, "b_tau", True) is None and best_row([], None, None) is None


def test_the_table_says_what_was_measured():
    table = report_table(merged_rows(HISTORY), None, None)
    assert "| trained tokens | 300 |" in table and "optimizer steps | 100 |" in table
    assert "| step | eval_a_tau | eval_a_tau_chain | eval_b_tau | eval_a_loss | eval_b_loss |" in table
    assert "| **2** | **1.500** | **1.250** | **-** | **3.500** | **3.600** |" in table
    assert "| 4 | 1.500 | 1.500 | - | 3.250 | - |" in table and "| 1 |" not in table
    assert "Nothing was evaluated yet." in report_table(merged_rows(HISTORY[:2]), None, None)
    assert "| steps | 0 |" in report_table([], "tau", True)
