# SPDX-License-Identifier: Apache-2.0
"""The two training phases of the quickstart, with the settings its figures were measured with. Level 7."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from gto_hf.data import load_jsonl, regenerate, training_rows
from gto_hf.drafts import DraftModel, Eagle3Draft, count_tokens
from gto_hf.evaluation import spread
from gto_hf.target import text_config
from gto_hf.tree import TreeConfig


@dataclass(frozen=True)
class Budget:
    """
    How much the quickstart does. The default fits 15 minutes on two CPU cores; `SMOKE` takes about one.

    Attributes:
        answers (`int`): Training answers used, in file order.
        phase1_steps, phase2_steps (`int`): Optimizer steps of 4 rows.
        questions (`int`): Held-out questions of the table.
        max_new_tokens (`int`): Per answer in the table.
        exact_questions (`int`): Questions of the float32 identity check.
    """

    answers: int = 1680
    phase1_steps: int = 360
    phase2_steps: int = 12
    questions: int = 30
    max_new_tokens: int = 48
    exact_questions: int = 5


SMOKE = Budget(answers=48, phase1_steps=6, phase2_steps=1, questions=2, max_new_tokens=12, exact_questions=1)

# On CPUs with bfloat16 units a forward of 17 tokens costs little more than that of one.
TREE = TreeConfig(depth=4, top_k=6, total_tokens=16)
DRAFT_VOCAB = 4096
MAX_LENGTH = 256


def load_rows(target: Any, tokenizer: Any, budget: Budget, rewrite_to: Path | None) -> list[dict]:
    """
    Training rows: the shipped answers of SmolLM2, or answers that `target` writes now.

    Args:
        target (`PreTrainedModel`), tokenizer: Model and its tokenizer.
        budget ([`Budget`]): How many answers.
        rewrite_to (`Path`, *optional*): Let the target write its answers to this file (continued if it exists); None takes
            the shipped ones, which are SmolLM2's.
    """
    with as_file(files("gto_hf") / "assets") as assets:
        prompts = load_jsonl(assets / "train_prompts.jsonl")
        shipped = load_jsonl(assets / "train_answers.jsonl")
    if rewrite_to is None:
        answers = shipped
    else:
        asked = spread(prompts, min(len(prompts), budget.answers))
        rewrite_to.parent.mkdir(parents=True, exist_ok=True)
        answers = regenerate(target, tokenizer, asked, rewrite_to, answers=-(-budget.answers // len(asked)))
    return training_rows(tokenizer, prompts, answers[: budget.answers], MAX_LENGTH)


def fresh_draft(target: Any, tokenizer: Any, rows: list[dict]) -> DraftModel:
    """An EAGLE-3 draft whose vocabulary is the most frequent tokens of the rows."""
    vocab = text_config(target).vocab_size
    torch.manual_seed(0)
    return Eagle3Draft.from_target(
        target,
        draft_vocab_size=min(DRAFT_VOCAB, vocab),
        token_counts=count_tokens((row["input_ids"] for row in rows), vocab),
        tokenizer=tokenizer,
        tree=TREE,
    )


def train(
    draft: DraftModel, target: Any, tokenizer: Any, rows: list[dict], output: Path, *, steps: int, phase: int
) -> DraftModel:
    """
    One phase: 1 is the token loss, 2 adds the GTO term at a far smaller rate.

    Returns:
        The same draft, trained, saved in `output`.
    """
    from gto_hf.trainer import GTOConfig, GTOTrainer

    args = GTOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=4,
        max_length=MAX_LENGTH,
        learning_rate=2e-3 if phase == 1 else 2e-5,
        # As deep as the tree is the default; at this budget fewer, cheaper steps see more tokens.
        ttt_steps=3,
        lr_scheduler_type="cosine" if phase == 1 else "constant",
        warmup_steps=min(20, steps // 4) if phase == 1 else 0,
        gto_weight=0.0 if phase == 1 else 0.5,
        num_groups=2,
        seed=phase,
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to="none",
    )
    trainer = GTOTrainer(
        model=draft, target_model=target, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
    return draft
