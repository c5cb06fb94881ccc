# SPDX-License-Identifier: Apache-2.0
"""Trainers on tiny models, and what they leave."""

from datasets import Dataset

from gto_hf import GTOConfig, GTOTrainer
from tests.tiny import tiny_tokenizer


OFF = {"report_to": "none", "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
OFF |= {"report": False, "eval_prompts": 0}  # both have tests of their own
SMALL = {"num_groups": 2, "group_size": 3, "tree_depth": 3, "tree_top_k": 3, "tree_total_tokens": 8}


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
