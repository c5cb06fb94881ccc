# SPDX-License-Identifier: Apache-2.0
"""`gto-hf eval`: plain generation and drafts on the same questions, in one run. Level 5."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.checkpoints import AutoDraft

from .prompts import Question, load_questions, prompts_hash, spread
from .runs import SystemRun, compare
from .table import results_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf eval`."""
    parser.add_argument("--target", required=True, help="Hub id or folder of the target")
    parser.add_argument("--draft", action="append", required=True, help="Hub id or folder of a draft; repeatable")
    parser.add_argument(
        "--sets", default="own", help="comma-separated: own, chat, code, math, a .jsonl file, a Hub id"
    )
    parser.add_argument("--questions", type=int, default=None, help="questions in all, spread over the sets")
    parser.add_argument("--temperature", default="0", help="comma-separated; 0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default=None, help="default: an accelerator if there is one, else the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="write counts and settings to this JSON file")


def run(args: argparse.Namespace) -> list[SystemRun]:
    """Load, answer, print the table; returns the runs."""
    temperatures = tuple(float(t) for t in args.temperature.split(","))
    questions: list[Question] = [q for name in args.sets.split(",") for q in load_questions(name)]
    if args.questions is not None:
        questions = spread(questions, args.questions)
    device = args.device or (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafts = {path: AutoDraft.from_pretrained(path, target=target, dtype=dtype).to(device) for path in args.draft}
    runs = compare(
        target,
        tokenizer,
        questions,
        drafts,
        temperatures=temperatures,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
    )
    facts = settings(args, questions, {name: draft.tree.to_dict() for name, draft in drafts.items()})
    print(results_table(runs))
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    if args.output is not None:
        counts = [asdict(r) for r in runs]
        args.output.write_text(json.dumps({"settings": facts, "runs": counts}, indent=1), encoding="utf-8")
    return runs


def settings(args: argparse.Namespace, questions: list[Question], trees: dict[str, dict]) -> dict[str, Any]:
    """What a figure must be read with."""
    return {
        "target": args.target,
        "dtype": args.dtype,
        "trees (root excluded)": trees,
        "questions": len(questions),
        "prompts hash": prompts_hash(questions),
        "max new tokens": args.max_new_tokens,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
