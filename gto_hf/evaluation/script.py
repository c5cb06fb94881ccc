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
from gto_hf.target import find_device

from .prompts import Question, load_questions, prompts_hash, spread
from .runs import SystemRun, agreement, compare
from .table import results_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf eval`."""
    parser.add_argument("--target", required=True, help="Hub id or folder of the target")
    parser.add_argument(
        "--draft", action="append", required=True, help="Hub id or folder of a draft, or NAME=PATH; repeatable"
    )
    parser.add_argument(
        "--sets",
        default="own",
        help="comma-separated: own, chat, code, math, a .jsonl file with `turns`, `messages` or `prompt`, a Hub id",
    )
    parser.add_argument(
        "--questions", type=positive, default=None, help="how many questions in all, spread over the sets"
    )
    parser.add_argument("--temperature", default="0", help="comma-separated; 0 is greedy")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of the weights"
    )
    parser.add_argument("--device", default=None, help="default: an accelerator if there is one, else the CPU")
    parser.add_argument("--seed", type=int, default=0, help="prompt i is sampled with seed + i by every system")
    parser.add_argument(
        "--require-identical", action="store_true", help="fail if any text differs from plain generate (float32 only)"
    )
    parser.add_argument("--output", type=Path, default=None, help="write counts and settings to this JSON file")


def run(args: argparse.Namespace) -> list[SystemRun]:
    """Load, answer, print the table; returns the runs."""
    temperatures = tuple(float(t) for t in args.temperature.split(","))
    questions: list[Question] = [q for name in question_sets(args.sets) for q in load_questions(name)]
    if args.require_identical and args.dtype != "float32":
        raise ValueError("`--require-identical` needs `--dtype float32`: half precision rounds near-ties differently.")
    if args.questions is not None:
        questions = spread(questions, args.questions)
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafts = {}
    for entry in args.draft:
        name, _, path = entry.rpartition("=")
        drafts[name or path] = AutoDraft.from_pretrained(path, target=target, dtype=dtype).to(device)
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
    same, answers = agreement(runs)
    print("\n" + results_table(runs))
    print(f"\n{args.dtype}: {same} of {answers} answers with a draft are identical to plain generate's")
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    if args.output is not None:
        counts = [asdict(r) for r in runs]
        args.output.write_text(json.dumps({"settings": facts, "runs": counts}, indent=1), encoding="utf-8")
    if args.require_identical and same < answers:
        raise ValueError(f"{answers - same} of {answers} texts differ from plain generate in {args.dtype}.")
    return runs


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that commands about one target and one draft share."""
    parser.add_argument("--target", required=True, help="Hub id or folder of the target")
    parser.add_argument("--draft", required=True, help="Hub id or folder of the draft")
    parser.add_argument("--sets", default="own", help="comma-separated question sets, as for eval")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of the weights"
    )
    parser.add_argument("--device", default=None, help="default: an accelerator if there is one, else the CPU")
    parser.add_argument("--seed", type=int, default=0, help="prompt i is sampled with seed + i")


def positive(text: str) -> int:
    """An option that counts something: an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def writable(path: Path | None) -> None:
    """Raise `ValueError` before any work if a file could not be written afterwards."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"Cannot write `{path}`: there is no folder `{path.resolve().parent}`.")


def question_sets(names: str) -> list[str]:
    """`"own,code"` to its names."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise ValueError("`--sets` names no question set.")
    return found


def load_models(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Target, tokenizer and attached draft of [`add_model_arguments`]."""
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    draft = AutoDraft.from_pretrained(args.draft, target=target, dtype=dtype).to(device)
    return target, AutoTokenizer.from_pretrained(args.target), draft


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
        "machine": machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine() -> str:
    """Accelerator or processor name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()
