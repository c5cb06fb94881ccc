# SPDX-License-Identifier: Apache-2.0
"""
Give a real LLM a draft, train it with Group Tree Optimization, and watch the same text come out faster.

    python examples/quickstart.py                 # SmolLM2-135M-Instruct from PyPI, no Hub access, about 15 minutes
    python examples/quickstart.py --smoke         # the same in small, under 2 minutes
    python examples/quickstart.py --target org/llm --regenerate answers.jsonl   # any model; it writes its own answers
"""

import argparse
import copy
import sys
import time
from pathlib import Path

import torch

import gto_hf
from gto_hf.evaluation import PLAIN, SystemRun, compare, load_questions, prompts_hash, results_table, spread
from gto_hf.quickstart import SMOKE, Budget, fresh_draft, load_rows, load_target, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--regenerate", type=Path, help="let the target write the training answers to this file")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="where the drafts are saved")
    parser.add_argument("--smoke", action="store_true", help="a tiny budget: does everything run?")
    args = parser.parse_args()
    budget, start = (SMOKE if args.smoke else Budget()), time.perf_counter()

    def say(text: str) -> None:
        print(f"\n[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    say("Loading the target")
    target, tokenizer, name = load_target(args.target)
    rows = load_rows(target, tokenizer, budget, args.regenerate, shipped=args.target is None)
    print(f"{name}, {len(rows)} answers of its own to train on")

    say("Phase I: token loss, unrolled as deep as the tree")
    draft = fresh_draft(target, tokenizer, rows)
    train(draft, target, tokenizer, rows, args.output / "phase1", steps=budget.phase1_steps, phase=1)
    say("Phase II: the same loss plus Group Tree Optimization")
    train(copy.deepcopy(draft), target, tokenizer, rows, args.output / "phase2", steps=budget.phase2_steps, phase=2)

    say("Measuring on held-out questions")
    drafts = {
        f"draft after {label}": gto_hf.AutoDraft.from_pretrained(args.output / folder, dtype=target.dtype)
        for label, folder in (("Phase I", "phase1"), ("Phase II", "phase2"))
    }
    questions = spread(load_questions("own"), budget.questions)
    runs = compare(target, tokenizer, questions, drafts, temperatures=(0.0, 1.0), max_new_tokens=budget.max_new_tokens)
    print(f"\n{name}, {target.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{len(questions)} questions (hash {prompts_hash(questions)}), {budget.max_new_tokens} new tokens each,")
    print(f"tree: {next(iter(drafts.values())).tree}\n")
    print(results_table(runs))

    say("Is it lossless? The same in float32, greedy and sampled with the same seed")
    dtype = str(target.dtype).removeprefix("torch.")
    final = "draft after Phase II"
    exact = compare(
        target.float(),
        tokenizer,
        spread(questions, budget.exact_questions),
        {final: drafts[final].float()},
        temperatures=(0.0, 1.0),
        max_new_tokens=budget.max_new_tokens,
    )
    same, total = agreement(exact)
    print(f"float32: text identical to plain generate for {same} of {total} answers")
    kept, answers = agreement(runs)
    print(f"{dtype}: {100 * (1 - kept / answers):.0f} % of answers differ (near-ties are rounded differently)")
    if same < total:
        sys.exit("float32 text differs from plain generate: this is a bug, please report it.")

    say(f"Done. The draft is in {args.output / 'phase2'}; use it like this:")
    print(f"""
    import gto_hf
    draft = gto_hf.AutoDraft.from_pretrained("{args.output / "phase2"}", dtype=model.dtype)
    model.generate(**inputs, assistant_model=draft)""")


def agreement(runs: list[SystemRun]) -> tuple[int, int]:
    """Answers of drafts that equal plain generate's at the same temperature, and answers of drafts in all."""
    plain = {run.temperature: run for run in runs if run.name == PLAIN}
    drafted = [run for run in runs if run.name != PLAIN]
    return sum(r.identical(plain[r.temperature]) for r in drafted), sum(len(r.answers) for r in drafted)


if __name__ == "__main__":
    main()
