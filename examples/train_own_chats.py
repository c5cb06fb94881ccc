# SPDX-License-Identifier: Apache-2.0
"""
Train a draft on your own chats: the target answers your users' turns, a fresh draft learns from the answers, τ is measured.

    python examples/train_own_chats.py chats.jsonl --target path/to/llm --output my-draft

A row of `chats.jsonl` is `{"messages": [{"role": "user", "content": ".."}, ..]}`. Given answers are replaced by the target's own,
because a draft must learn what its target writes. Killed runs go on with the same command.
"""

import argparse
from pathlib import Path

from datasets import Dataset

from gto_hf import Eagle3Draft, GTOConfig, GTOTrainer, TreeConfig, check
from gto_hf.data import dataset_token_counts, hold_out, load_jsonl, regenerate
from gto_hf.quickstart import load_target
from gto_hf.target import text_config


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path, help="JSON Lines file")
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--output", type=Path, default=Path("runs/own-chats"), help="where everything is saved")
    parser.add_argument("--answers", type=int, default=2, help="per chat; more is better")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens the draft can say")
    parser.add_argument("--epochs", type=float, default=3, help="of Phase I")
    parser.add_argument("--gto-steps", type=int, default=50, help="steps of Phase II")
    args = parser.parse_args(argv)

    target, tokenizer = load_target(args.target)
    tokenizer.padding_side = "left"
    args.output.mkdir(parents=True, exist_ok=True)
    rows = regenerate(
        target,
        tokenizer,
        load_jsonl(args.chats),
        args.output / "answers.jsonl",
        answers=args.answers,
        max_new_tokens=args.max_new_tokens,
    )
    rows = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
    train, test = map(Dataset.from_list, hold_out(rows))  # by chat: several answers to one stay together

    vocab = text_config(target).vocab_size
    draft = Eagle3Draft.from_target(
        target,
        draft_vocab_size=min(args.draft_vocab, vocab),
        token_counts=dataset_token_counts(rows, tokenizer, vocab),
        tokenizer=tokenizer,
        tree=TreeConfig(depth=4, top_k=6, total_tokens=16),
    )
    phases = {
        "phase1": {"gto_weight": 0.0, "learning_rate": 1e-3, "num_train_epochs": args.epochs, "warmup_steps": 20},
        "phase2": {"gto_weight": 0.5, "learning_rate": 2e-5, "max_steps": args.gto_steps, "num_groups": 4},
    }
    for name, options in phases.items():
        config = GTOConfig(
            str(args.output / name), per_device_train_batch_size=4, max_length=1024, report_to="none", **options
        )
        trainer = GTOTrainer(draft, target, config, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
        trainer.train()
        trainer.save_model()
        print(f"{name}: acceptance length on chats it has not seen: {trainer.evaluate()['eval_tau']:.2f}")
    held = [tuple(i for i, y in zip(r["input_ids"], r["labels"], strict=True) if y == -100) for r in test]
    check(target, draft, full=True, prompts=[ids for ids in dict.fromkeys(held) if ids][:4])


if __name__ == "__main__":
    main()
