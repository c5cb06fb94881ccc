# SPDX-License-Identifier: Apache-2.0
"""
Several prompts at once: one target forward per round serves all rows, and each row accepts as much as it can.

    python examples/batch.py
    python examples/batch.py --target org/llm --draft org/draft "First prompt" "Second prompt" --sample

Every row is what it would be alone (up to rounding in half precision). Rows wait for the slowest one, so put prompts of like length together.
"""

import argparse

import torch

from gto_hf import AutoDraft
from gto_hf.data import render_prompt
from gto_hf.quickstart import load_target, shipped_draft


PROMPTS = ["Name three uses of a paper clip.", "What is 17 times 6?", "Write a haiku about rain.", "Who wrote Hamlet?"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--draft", default=str(shipped_draft()), help="Hub id or folder")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--sample", action="store_true", help="sample with temperature 0.7 instead of greedy")
    args = parser.parse_args(argv)

    target, tokenizer = load_target(args.target)
    draft = AutoDraft.from_pretrained(args.draft, target=target, dtype=target.dtype)
    tokenizer.padding_side = "left"  # as for every causal LM: the text goes on at the right
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids = [render_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in args.prompts]
    inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(target.device)
    torch.manual_seed(0)
    output = target.generate(
        **inputs,
        assistant_model=draft,
        max_new_tokens=args.max_new_tokens,
        do_sample=args.sample,
        temperature=0.7 if args.sample else None,
        top_p=None,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
    )
    answers = tokenizer.batch_decode(output.sequences[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    for prompt, answer in zip(args.prompts, answers, strict=True):
        print(f"> {prompt}\n{answer.strip()}\n")
    counts = output.statistics
    print(
        f"{counts.emitted_tokens} tokens of {counts.runs} rows in {counts.target_forwards} target forwards; "
        f"each row's own acceptance length is {counts.tau:.2f} on average"
    )


if __name__ == "__main__":
    main()
