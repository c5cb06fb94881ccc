# SPDX-License-Identifier: Apache-2.0
"""`gto-hf bench decode`, `gto-hf check` and `gto-hf draw`: options and printing. Level 5."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gto_hf.data import render_prompt
from gto_hf.decoding import record_rounds

from .bench import AUTO, as_json, bench_decode, bench_table, default_systems, limits_line, paired_ratio, sets_table
from .draw import SUFFIXES, draw_tree
from .facts import settings
from .lossless import check
from .misalignment import misalignment, misalignment_table
from .prompts import load_questions, load_sets, set_names, spread
from .script import add_model_arguments, load_models, positive, read_temperatures, writable
from .trees import parse_trees


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf bench decode`."""
    add_model_arguments(parser)
    parser.add_argument(
        "--questions", type=positive, default=30, help="first turns of how many questions, spread over the sets"
    )
    parser.add_argument(
        "--trees",
        default="3x4x8,4x6x16,5x8x24,8x10x60",
        help="fixed trees as depth x top-k x nodes (root excluded), comma-separated; their maxima limit the auto tree",
    )
    parser.add_argument("--assistant", default=None, help="a small LM for stock chain assistance")
    parser.add_argument("--early-exit", type=positive, default=None, help="layers of stock early-exit assistance")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--output", type=Path, default=None, help="write everything measured to this JSON file")


def run_bench(args: argparse.Namespace) -> str:
    """Measure, print the table and what limits the speed; returns the table."""
    trees = parse_trees(args.trees, "--trees")
    read_temperatures(str(args.temperature))
    if not trees:
        raise ValueError("`--trees` names no tree.")
    if args.max_new_tokens < 2:
        raise ValueError("`--max-new-tokens` must be 2 or more: the first token is the prefill's and needs no draft.")
    writable(args.output)
    target, tokenizer, draft = load_models(args)
    questions = spread([q for each in load_sets(args.sets) for q in each.questions], args.questions)
    prompts = [render_prompt(tokenizer, q.messages(0, [])) for q in questions]
    assistant = None
    if args.assistant is not None:
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.dtype).to(target.device).eval()
    systems = default_systems(draft, trees, assistant=assistant, early_exit=args.early_exit)
    results = bench_decode(
        target,
        draft,
        systems,
        prompts,
        new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        memory=not args.no_memory,
    )
    trees = {s.name: s.tree.to_dict() for s in systems if s.tree is not None}
    facts = settings(args, questions, trees, {args.draft: draft}, target)
    facts["draft"], facts["prompt sets"] = args.draft, [question.set for question in questions]
    table = bench_table(results)
    auto = next(r for r in results if r.name == AUTO)
    fixed = [r for r in results if r.name.startswith("draft, tree")]
    best = max(fixed, key=lambda r: r.tokens_per_second)
    median = auto.milliseconds("total")
    print("\n" + table + "\n")
    print(sets_table(results, [question.set for question in questions]) + "\n")
    print(f"{AUTO} over the best fixed one ({best.name}): {paired_ratio(auto, best)}; median round {median:.1f} ms;")
    print(f"{auto.statistics.plain_rounds} of its {auto.statistics.rounds} rounds drafted nothing")
    for result in (best, auto):
        print(limits_line(result, results[0]))
    print(", ".join(f"{key}: {value}" for key, value in facts.items() if key != "prompt sets"))
    if args.output is not None:
        args.output.write_text(json.dumps(as_json(results, facts), indent=1), encoding="utf-8")
    return table


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf check`."""
    add_model_arguments(parser)
    parser.add_argument(
        "--questions", type=positive, default=4, help="how many questions to compare texts on, with --full"
    )
    parser.add_argument("--full", action="store_true", help="compare texts on real questions as well")


def run_check(args: argparse.Namespace) -> None:
    """Print the verdict; fails if the pair cannot be used."""
    target, tokenizer, draft = load_models(args)
    questions = spread([q for each in load_sets(args.sets) for q in each.questions], args.questions)
    prompts = [render_prompt(tokenizer, q.messages(0, [])) for q in questions]
    if not check(target, draft, full=args.full, prompts=prompts).ok:
        raise ValueError("The check failed; see above.")


def add_draw_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf draw`."""
    add_model_arguments(parser)
    parser.add_argument("--prompt", default=None, help="what to answer; default: the first question of the sets")
    parser.add_argument("--round", type=int, default=0, help="which round to draw, from 0")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    parser.add_argument("--file", type=Path, default=None, help="draw to this .svg, .png or .pdf as well")


def run_draw(args: argparse.Namespace) -> None:
    """Answer one prompt, print one round as a tree and the misalignment figures of all rounds."""
    if args.file is not None and args.file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"`--file {args.file}` must end in {', '.join(SUFFIXES)}.")
    writable(args.file)
    target, tokenizer, draft = load_models(args)
    question = load_questions(set_names(args.sets)[0])[0]
    messages = question.messages(0, []) if args.prompt is None else [{"role": "user", "content": args.prompt}]
    ids = torch.tensor([render_prompt(tokenizer, messages)], device=target.device)
    with record_rounds() as recorder:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
        )
    rounds: list[Any] = recorder.rounds
    if not 0 <= args.round < len(rounds):
        raise ValueError(f"`--round {args.round}`: the answer took {len(rounds)} rounds, numbered from 0.")
    print(draw_tree(rounds[args.round], tokenizer, file=args.file))
    print(misalignment_table({"this answer": misalignment(rounds)}))
