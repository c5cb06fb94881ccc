# SPDX-License-Identifier: Apache-2.0
"""`gto-hf eval`: plain generation, other baselines and drafts on the same questions, in one run. Level 5."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.checkpoints import AutoDraft
from gto_hf.data.answer_file import AnswerFile
from gto_hf.data.template_option import add_template_option, template_kwargs
from gto_hf.target import find_device

from .bench import System
from .facts import TREES, identity, settings
from .plots import check_matplotlib, write_plots
from .prompts import Question, load_sets, split_name, spread, spread_each, with_system
from .report import summarize, write_report
from .runs import SystemRun, agreement
from .session import Detail, measure
from .systems import baseline_system, draft_systems, parse_baselines
from .table import results_table
from .trees import parse_trees


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf eval`."""
    parser.add_argument("--target", required=True, help="Hub id or folder of the target")
    parser.add_argument(
        "--draft", action="append", required=True, help="Hub id or folder of a draft, or NAME=PATH; repeatable"
    )
    parser.add_argument(
        "--baseline",
        default="plain",
        help="comma-separated: prompt-lookup[:TOKENS], assisted:MODEL (stock assistance by a small LM), dflash:DRAFT; plain "
        "generation is always there",
    )
    parser.add_argument(
        "--tree-sizes",
        default="",
        help="trees to try with every draft beside its own, as depth x top-k x nodes (root excluded), comma-separated: "
        "3x3x8,8x10x60; 8x1x8 is a chain",
    )
    parser.add_argument(
        "--sets",
        default="own",
        help="comma-separated: own, chat, code, math; mt-bench, humaneval, gsm8k, spec-bench, speed-bench (from the Hub); "
        "NAME=FILE or a .jsonl file with `turns`, `messages` or `prompt`; a Hub id",
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--questions", type=positive, default=None, help="how many questions in all, spread over the sets"
    )
    some.add_argument("--questions-per-set", type=positive, default=None, help="or how many of every set")
    parser.add_argument(
        "--system",
        default=None,
        help="system prompt of questions that have none: a text, or the name of a file that holds it",
    )
    add_template_option(parser)
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
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="a folder: answers as they come (the same command goes on with them), results.json, results.md, plots, and "
        "where time and trees go; or a .json file for counts and settings alone",
    )
    parser.add_argument("--no-plots", action="store_true", help="with a folder: no PNG files, no matplotlib")
    parser.add_argument(
        "--no-details", action="store_true", help="with a folder: no time split, and no second call to record trees"
    )


def run(args: argparse.Namespace) -> list[SystemRun]:
    """Load, answer, print the table; returns the runs."""
    temperatures = read_temperatures(args.temperature)
    baselines, trees = parse_baselines(args.baseline), parse_trees(args.tree_sizes, "--tree-sizes")
    folder = args.output if args.output is not None and args.output.suffix != ".json" else None
    if args.require_identical and args.dtype != "float32":
        raise ValueError("`--require-identical` needs `--dtype float32`: half precision rounds near-ties differently.")
    if folder is None:
        writable(args.output)
    else:
        writable_folder(folder)
        if not args.no_plots:
            check_matplotlib()
    sets = load_sets(args.sets)
    questions: list[Question] = [q for each in sets for q in each.questions]
    if args.questions is not None:
        questions = spread(questions, args.questions)
    if args.questions_per_set is not None:
        questions = spread_each(questions, args.questions_per_set)
    system = system_prompt(args.system)
    if system is not None:
        questions = with_system(questions, system)
    template_kwargs(args)  # before anything is loaded
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafts = {}
    for entry in args.draft:
        name, path = split_name(entry)
        if (name or path) in drafts:
            raise ValueError(f"`--draft` names `{name or path}` twice. Name drafts with `--draft NAME=PATH`.")
        drafts[name or path] = AutoDraft.from_pretrained(path, target=target, dtype=dtype).to(device)
    systems = [*(baseline_system(b, target, tokenizer) for b in baselines), *draft_systems(drafts, trees)]
    check_names(systems)
    own_trees = {name: draft.tree.to_dict() for name, draft in drafts.items()}
    facts = settings(args, questions, own_trees, drafts, target, baselines)
    variables = template_kwargs(args, tokenizer)
    facts |= {"system prompt": system, "chat template kwargs": variables}
    detail = Detail() if folder is None or args.no_details else Detail(time_split=True, trees=True)
    options = {"temperatures": temperatures, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
    options["template_kwargs"] = variables
    for each in sets:
        print(each)
    if folder is None:
        runs = measure(target, tokenizer, questions, systems, detail=detail, **options)
    else:
        same = identity(facts, temperatures, systems, target, tokenizer, detail)
        with AnswerFile(folder / "answers.jsonl", same) as file:
            runs = measure(target, tokenizer, questions, systems, detail=detail, file=file, **options)
    finish(
        args, folder, runs, facts, [str(each) for each in sets], {system.name for system in systems[len(baselines) :]}
    )
    return runs


def finish(
    args: argparse.Namespace,
    folder: Path | None,
    runs: list[SystemRun],
    facts: dict[str, Any],
    sets: list[str],
    drafted: set[str],
) -> None:
    """Print the table and write what was asked for; `drafted` are the names of the systems with a draft."""
    same, answers = agreement(runs, drafted)
    print("\n" + results_table(runs))
    print(f"\n{args.dtype}: {same} of {answers} answers with a draft are identical to plain generate's")
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    if folder is not None:
        results = summarize(runs)
        write_report(folder, results, facts, sets)
        plots = [] if args.no_plots else write_plots(folder, results, facts[TREES])
        print(
            "\nwritten: " + ", ".join(str(path) for path in (folder / "results.md", folder / "results.json", *plots))
        )
    elif args.output is not None:
        counts = [
            {"name": r.name, "temperature": r.temperature, "answers": [a.plain_dict() for a in r.answers]}
            for r in runs
        ]
        args.output.write_text(json.dumps({"settings": facts, "runs": counts}, indent=1), encoding="utf-8")
    if args.require_identical and same < answers:
        raise ValueError(f"{answers - same} of {answers} texts differ from plain generate in {args.dtype}.")


def system_prompt(given: str | None) -> str | None:
    """
    The text of `--system`.

    Raises:
        ValueError: If it is empty, which would be another prompt than none, or cannot be read.
    """
    if given is None:
        return None
    # A text may be longer than a name can be, or span lines.
    named = "\n" not in given and len(given) < 255 and Path(given).is_file()
    text = Path(given).read_text(encoding="utf-8").strip() if named else given
    if not text.strip():
        raise ValueError(f"`--system {given}` is empty. Give a text or a file with one, or leave the option out.")
    return text


def check_names(systems: list[System]) -> None:
    """Raise `ValueError` if two systems would share a row of the tables."""
    names = [system.name for system in systems]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two systems are called {', '.join(twice)}. Name drafts with `--draft NAME=PATH`.")


def read_temperatures(text: str) -> tuple[float, ...]:
    """`"0,1"` to its numbers."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"`--temperature {text}`: give numbers, comma-separated, such as 0,1.") from error
    if not all(0 <= value < float("inf") for value in found) or len(set(found)) < len(found):
        raise ValueError(f"`--temperature {text}`: temperatures are 0 or more, each once.")
    return found


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
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"Cannot write the file `{path}`: a folder has that name. Give another name.")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"Cannot write `{path}`: there is no folder `{path.resolve().parent}`.")


def writable_folder(path: Path) -> None:
    """Raise `ValueError` before any work if a folder, which need not exist, could not be made."""
    first = next(each for each in (path.resolve(), *path.resolve().parents) if each.exists())
    if not first.is_dir():
        raise ValueError(
            f"`--output {path}`: `{first}` is a file, so there cannot be such a folder. Name a new folder, or a file that ends "
            "in .json."
        )


def load_models(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Target, tokenizer and attached draft of [`add_model_arguments`]."""
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    draft = AutoDraft.from_pretrained(args.draft, target=target, dtype=dtype).to(device)
    return target, AutoTokenizer.from_pretrained(args.target), draft
