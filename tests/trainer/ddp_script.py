# SPDX-License-Identifier: Apache-2.0
"""Run by test_ddp.py under torchrun: two ranks, one of which never has a group; writes the trained draft per rank."""

import os
import sys

import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset

from gto_hf import GTOConfig, GTOTrainer
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


def main(folder: str, weight: float) -> None:
    target = tiny_target()
    rows = written_rows(target, 8, 30)
    for i in range(1, 8, 2):  # every second row, so every batch of one rank, is too short for a group
        rows[i] = {key: ids[:7] for key, ids in rows[i].items()}
    args = GTOConfig(
        folder,
        max_steps=3,
        per_device_train_batch_size=1 if "RANK" in os.environ else 2,
        learning_rate=1e-3,
        gto_weight=weight,
        num_groups=2,
        group_size=8,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=2,
        eval_prompts=2,
        eval_max_new_tokens=8,
    )
    draft = tiny_draft(target)
    held_out = {"three": Dataset.from_list(rows[:3]), "one": Dataset.from_list(rows[:1])}
    held_out["stream"] = IterableDataset.from_generator(lambda: iter(rows[:4]))
    trainer = GTOTrainer(
        draft,
        target,
        args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=held_out,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save({"state": draft.state_dict(), "logs": trainer.state.log_history}, f"{folder}/rank{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
