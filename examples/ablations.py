# SPDX-License-Identifier: Apache-2.0
"""
What does each part of Group Tree Optimization do? One switch at a time, from the same draft, on the same rows in the same order.

    python examples/ablations.py                                  # the shipped draft and rows, a few minutes per variant
    python examples/ablations.py --variants control gto gto-no-debias --steps 200 --seeds 3

The figure is τ on held-out prompts. Small runs differ by chance: compare differences with the spread over several seeds. `examples/research/comparison.py` is
the careful version (tuned rates, equal wall-clock time, many questions).
"""

import argparse
import copy
import statistics
from pathlib import Path

from datasets import Dataset

from gto_hf import AutoDraft, GTOConfig, GTOTrainer
from gto_hf.data import hold_out, load_jsonl
from gto_hf.quickstart import Budget, load_rows, load_target, shipped_draft


VARIANTS = {
    "control": {"gto_weight": 0.0},  # the token loss alone, for as many steps
    "gto": {},
    "gto-no-debias": {"gto_debias": False},
    "gto-nodes": {"gto_aggregation": "nodes"},
    "gto-m1": {"group_size": 1},  # every advantage is zero: must equal the control
    "tree_kl": {"gto_objective": "tree_kl", "gto_weight": 1.0},
    "membership": {"gto_objective": "membership", "gto_weight": 1.0},
    "lk_hybrid": {"gto_weight": 0.0, "token_objective": "lk_hybrid"},
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--draft", default=str(shipped_draft()), help="Hub id or folder")
    parser.add_argument("--rows", type=Path, help="rows in any format of the trainer (default: the shipped answers)")
    parser.add_argument("--variants", nargs="+", default=["control", "gto", "tree_kl"], choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded per held-out prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, default=Path("runs/ablations"))
    args = parser.parse_args(argv)

    target, tokenizer = load_target(args.target)
    rows = load_jsonl(args.rows) if args.rows else load_rows(target, tokenizer, Budget(), None)
    train, held = map(Dataset.from_list, hold_out(rows, 0.1))  # no prompt is on both sides
    start = AutoDraft.from_pretrained(args.draft)
    print("| variant | τ per seed | mean | ± |\n|---|---|---|---|")
    for name in args.variants:
        taus = []
        for seed in range(args.seeds):
            config = GTOConfig(
                str(args.output / f"{name}-{seed}"),
                **{"num_groups": 4, "gto_weight": 0.5, **VARIANTS[name]},
                max_steps=args.steps,
                learning_rate=args.learning_rate,
                per_device_train_batch_size=4,
                max_length=256,
                seed=seed,
                eval_max_new_tokens=args.new_tokens,
                **{"save_strategy": "no", "report_to": "none", "report": False, "eval_prompts": 32},
            )
            draft = copy.deepcopy(start)
            trainer = GTOTrainer(draft, target, config, None, train, held, processing_class=tokenizer)
            trainer.train()
            taus.append(trainer.evaluate()["eval_tau"])
        spread = statistics.stdev(taus) if len(taus) > 1 else float("nan")
        print(
            f"| {name} | {', '.join(f'{tau:.3f}' for tau in taus)} | {statistics.mean(taus):.3f} | {spread:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
