# SPDX-License-Identifier: Apache-2.0
"""
Answers of the target to given prompts, batched and resumable: the text a draft should be trained on (level 4).

The very ids that the target read and generated are kept, so the file is trained on as it is and nothing is rendered again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from os import PathLike
from typing import Any

import torch

from .answer_file import AnswerFile
from .dialogue import Dialogue
from .generation import SAMPLING, check_generation
from .local import LocalTarget
from .progress import Progress
from .prompts import Conversation, Skipped, conversations
from .rows import load_jsonl
from .server import RowRefused, ServerTarget


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
        prompts (`list[dict]`): `{"id", "prompt"}`, or any row that [`~gto_hf.data.prompts.conversation`] takes.
        path (`str`): Output file; see [`~gto_hf.data.dialogue.Dialogue`] for its rows. First every prompt is answered once,
            then every prompt a second time, and so on. Prompts of like length stand together.
        answers (`int`, *optional*, defaults to `1`): Answers per prompt. May be raised to continue a finished file.
        max_new_tokens (`int`, *optional*, defaults to `256`): Longest answer; longer ones are cut (`finished` false).
        batch_size (`int`, *optional*, defaults to `32`): Prompts per `generate` call. Part of what makes a run equal.
        seed (`int`, *optional*, defaults to `0`): Of the first batch; sets the global torch seed for every batch.
        **generate_kwargs: Fields of a `GenerationConfig`; the default is `do_sample=True, temperature=0.7, top_p=0.95`.

    Returns:
        `list[dict]`: All rows of the file.

    Raises:
        ValueError: If no prompt can be answered, an option cannot be used, or the file was written with other settings.
    """
    check_counts(answers=answers, max_new_tokens=max_new_tokens, batch_size=batch_size)
    fields = check_generation({"max_new_tokens": max_new_tokens, **(generate_kwargs or SAMPLING)}, answers)
    asked, skipped = conversations((f"row {i}", row) for i, row in enumerate(prompts))
    settings = settings_of(asked, fields, answers=answers, seed=seed, batch_size=batch_size)
    settings |= {"target": target.config._name_or_path, "dtype": str(target.dtype).removeprefix("torch.")}
    local = LocalTarget(target, tokenizer, fields)
    with AnswerFile(path, settings) as file:
        answer_locally(local, asked, file, skipped, answers=answers, batch_size=batch_size, seed=seed)
    return load_jsonl(path)


def answer_locally(
    local: LocalTarget,
    asked: Sequence[Conversation],
    file: AnswerFile,
    skipped: Skipped,
    *,
    answers: int,
    batch_size: int,
    seed: int,
) -> Progress:
    """
    Answer every conversation that `file` does not hold yet, batch by batch.

    Args:
        local ([`LocalTarget`]), asked, file ([`AnswerFile`]): Who answers what, and where it goes.
        skipped ([`Skipped`]): Conversations that cannot be answered are added.
        answers, batch_size, seed (`int`): See [`regenerate`].

    Returns:
        [`Progress`]: What was written.

    Raises:
        ValueError: If nothing can be answered, or the file holds other conversations than these settings would give.
    """
    plan = local.plan(asked, batch_size, skipped)
    if not plan:
        raise ValueError(f"None of the {len(asked)} prompts can be answered.\n{skipped}")
    batches = [(number, batch) for number in range(answers) for batch in plan]
    keys = [(each.id, number) for number, batch in batches for each in batch]
    if file.done != keys[: len(file.done)]:
        raise ValueError(f"`{file.path}` has been edited: its rows are not those of this run. Give another output.")
    first = kept = 0
    while first < len(batches) and kept + len(batches[first][1]) <= len(file.done):
        kept += len(batches[first][1])
        first += 1
    file.keep(kept)
    with Progress(len(keys), kept) as progress:
        for number, batch in batches[first:]:
            dialogues = [Dialogue(each, number) for each in batch]
            torch.manual_seed(seed + kept)
            local.answer(dialogues)
            file.append([row for each in dialogues for row in each.rows])
            kept += len(batch)
            progress.add(dialogues)
    return progress


def answer_remotely(
    server: ServerTarget,
    asked: Sequence[Conversation],
    file: AnswerFile,
    skipped: Skipped,
    *,
    answers: int,
    concurrency: int,
) -> Progress:
    """
    Answer every conversation that `file` does not hold yet, several at a time; rows are written as they are complete.

    Args:
        server ([`ServerTarget`]), asked, file ([`AnswerFile`]): Who answers what, and where it goes.
        skipped ([`Skipped`]): Conversations that the server refuses are added.
        answers (`int`): Per conversation.
        concurrency (`int`): Conversations in flight.

    Returns:
        [`Progress`]: What was written.

    Raises:
        ValueError: If the server cannot be reached any more (after all that is in flight has been written), if it refuses
            everything, or if the file holds conversations that were not asked.
    """
    keys = {(each.id, number): each for number in range(answers) for each in asked}
    done = set(file.done)
    if not done <= set(keys) or len(done) < len(file.done):
        raise ValueError(f"`{file.path}` has been edited: its rows are not those of this run. Give another output.")
    jobs = (Dialogue(each, key[1]) for key, each in keys.items() if key not in done)
    flying: dict[Future, Dialogue] = {}
    failure: ValueError | None = None
    with Progress(len(keys), len(done)) as progress, ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while failure is None and len(flying) < concurrency and (job := next(jobs, None)) is not None:
                    flying[pool.submit(server.answer, job)] = job
                if not flying:
                    break
                for landed in wait(flying, return_when=FIRST_COMPLETED).done:
                    dialogue = flying.pop(landed)
                    try:
                        file.append(landed.result().rows)
                        progress.add([dialogue])
                    except RowRefused as refusal:
                        skipped.add(str(refusal), f"id {dialogue.conversation.id}")
                    except ValueError as error:
                        failure = failure or error
                        server.stopped.set()
        finally:
            server.stopped.set()
    if failure is not None:
        raise failure
    if not done and not progress.conversations:
        raise ValueError(f"None of the {len(asked)} prompts was answered.\n{skipped}")
    return progress


def settings_of(
    asked: Sequence[Conversation], fields: dict[str, Any], *, answers: int, seed: int, **more: Any
) -> dict[str, Any]:
    """What the rows depend on, flat, as an [`AnswerFile`] compares it; two sets of prompts differ in `prompts_hash`."""
    digest = hashlib.sha256()
    for each in asked:
        digest.update(json.dumps([each.id, each.asks, each.extra], default=str).encode())
    return {
        "prompts": len(asked),
        "prompts_hash": digest.hexdigest()[:16],
        "answers": answers,
        "seed": seed,
        **more,
        **{f"generation.{name}": value for name, value in fields.items()},
    }


def check_counts(**counts: int | None) -> None:
    """Raise `ValueError` for the first that is given and less than 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"`{name}={count}` must be at least 1.")
