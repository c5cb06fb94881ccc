# SPDX-License-Identifier: Apache-2.0
"""
Answers of the target to given prompts, batched and resumable: the text a draft should be trained on.

The ids are kept, not only the text: where the text would tokenise differently, the generated ids are stored beside it.
"""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from .rows import load_jsonl, render_prompt


def regenerate(
    target: Any,
    tokenizer: Any,
    prompts: list[dict[str, Any]],
    path: str | PathLike,
    *,
    answers: int = 1,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    seed: int = 0,
    **generate_kwargs: Any,
) -> list[dict[str, Any]]:
    """
    Let the target answer every prompt, `answers` times, and append the rows to a JSON Lines file.

    Interrupted runs continue where the file ends and give the same file as an uninterrupted one: every batch has its
    own seed, and a half-written batch is done again.

    Args:
        target (`PreTrainedModel`): Writes the answers with stock `generate`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`list[dict]`): `{"id", "prompt"}`.
        path (`str`): Output file; rows are `{"id", "answer", "finished", "text"}`, plus `"ids"` where needed.
        answers (`int`, *optional*, defaults to `1`): Answers per prompt.
        max_new_tokens (`int`, *optional*, defaults to `256`): Longest answer; longer ones are cut (`finished` false).
        batch_size (`int`, *optional*, defaults to `32`): Prompts per `generate` call. Part of what makes a run equal.
        seed (`int`, *optional*, defaults to `0`): Of the first batch; sets the global torch seed for every batch.
        **generate_kwargs: Passed to `generate`; the default is `do_sample=True, temperature=0.7, top_p=0.95`.

    Returns:
        `list[dict]`: All rows of the file.
    """
    generate_kwargs = generate_kwargs or {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
    path = Path(path)
    jobs = [(prompt, answer) for answer in range(answers) for prompt in prompts]
    done = _complete_batches(path, batch_size, len(jobs))
    starts = range(done, len(jobs), batch_size)
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(jobs), initial=done, desc="answers") as bar:
        for start in starts:
            batch = jobs[start : start + batch_size]
            torch.manual_seed(seed + start)
            for row in _answer(target, tokenizer, batch, max_new_tokens, generate_kwargs):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    return load_jsonl(path)


def _complete_batches(path: Path, batch_size: int, total: int) -> int:
    """Rows of whole batches already in the file; cuts what stands after them."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is half a row
    kept = len(lines) if len(lines) == total else len(lines) // batch_size * batch_size
    size = sum(len(line) + 1 for line in lines[:kept])
    os.truncate(path, size)
    return kept


@torch.inference_mode()
def _answer(
    target: Any, tokenizer: Any, batch: list[tuple[dict, int]], max_new_tokens: int, generate_kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """One batch of answers as rows."""
    ids = [render_prompt(tokenizer, [{"role": "user", "content": prompt["prompt"]}]) for prompt, _ in batch]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(target.device)
    output = target.generate(**inputs, max_new_tokens=max_new_tokens, **generate_kwargs)
    rows = []
    for (prompt, number), new in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        finished = tokenizer.eos_token_id in new
        if finished:
            new = new[: new.index(tokenizer.eos_token_id)]
        text = tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        row = {"id": prompt["id"], "answer": number, "finished": finished, "text": text}
        if tokenizer(text, add_special_tokens=False)["input_ids"] != new:
            row["ids"] = new
        rows.append(row)
    return rows
