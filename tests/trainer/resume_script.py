# SPDX-License-Identifier: Apache-2.0
"""Run by test_resume.py, which kills it: trains and saves after every step."""

import sys

from datasets import Dataset

from gto_hf import GTOConfig, GTOTrainer
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


def make(folder: str, max_steps: int) -> GTOTrainer:
    target = tiny_target()
    args = GTOConfig(
        folder,
        max_steps=max_steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        num_groups=2,
        group_size=3,
        tree_depth=3,
        tree_top_k=3,
        tree_total_tokens=8,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=1,
    )
    dataset = Dataset.from_list(written_rows(target, 8, 24))
    return GTOTrainer(tiny_draft(target), target, args, train_dataset=dataset, processing_class=tiny_tokenizer())


if __name__ == "__main__":
    make(sys.argv[1], 10_000).train()
