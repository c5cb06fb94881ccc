# SPDX-License-Identifier: Apache-2.0
"""
Does Group Tree Optimization beat simply training longer? One command, one real model, honest controls.

    python examples/comparison.py --train rows.jsonl --held held.jsonl --questions mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

Phase I trains a draft to its plateau. From there every variant starts with the same weights and sees the same rows in the same
order. Every stage is skipped if its result is there and resumed if it was interrupted, so the command can be killed and
repeated. Without files it uses the package's own answers and questions.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from gto_hf import Eagle3Draft, GTOConfig, GTOTrainer, TreeConfig, count_tokens
from gto_hf.data import load_jsonl
from gto_hf.quickstart import load_target
from gto_hf.target import text_config


# The budget, fixed before the first run.
TREE = TreeConfig(depth=5, top_k=6, total_tokens=20)
DRAFT_VOCAB = 8192
MAX_LENGTH = 512
ROWS = 8  # per step
PHASE1 = {"num_train_epochs": 2, "learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 40}
TTT_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="rows with input_ids and labels (JSON Lines)")
    parser.add_argument("--output", type=Path, default=Path("runs/comparison"))
    args = parser.parse_args()
    target, tokenizer = load_target()
    rows = load_jsonl(args.train)
    phase1(target, tokenizer, rows, args.output)


def phase1(target, tokenizer, rows, output: Path) -> Path:
    """The draft that everything starts from."""
    folder = output / "phase1"
    if (folder / "model.safetensors").exists():
        return folder
    vocab = text_config(target).vocab_size
    torch.manual_seed(0)
    draft = Eagle3Draft.from_target(
        target,
        draft_vocab_size=DRAFT_VOCAB,
        token_counts=count_tokens((row["input_ids"] for row in rows), vocab),
        tokenizer=tokenizer,
        tree=TREE,
    )
    train(draft, target, tokenizer, rows, folder, gto_weight=0.0, features_path=str(output / "features"), **PHASE1)
    return folder


def train(draft, target, tokenizer, rows, folder: Path, **options) -> None:
    """One run of the trainer, resumed from its last checkpoint if it was interrupted."""
    settings = {
        "per_device_train_batch_size": ROWS,
        "max_length": MAX_LENGTH,
        "ttt_steps": TTT_STEPS,
        "train_sampling_strategy": "group_by_length",
        "logging_steps": 10,
        "save_steps": 50,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": not os.isatty(2),
    }
    data = Dataset.from_list([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
    trainer = GTOTrainer(
        draft,
        target,
        GTOConfig(str(folder), **{**settings, **options}),
        train_dataset=data,
        processing_class=tokenizer,
    )
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    (folder / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
