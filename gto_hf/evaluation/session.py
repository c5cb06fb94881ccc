# SPDX-License-Identifier: Apache-2.0
"""
Answering the same prompts with several systems, interleaved, and keeping every answer as soon as it is there. Level 5.

A timed call carries nothing but a streamer that looks at the clock. Trees are recorded in a second, untimed call of the
same prompt, because recording costs draft forwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from gto_hf.data import render_prompt
from gto_hf.data.answer_file import AnswerFile
from gto_hf.data.rows import load_jsonl
from gto_hf.decoding import DecodingStatistics, record_rounds
from gto_hf.target import text_config

from .bench import System
from .counts import Counts
from .prompts import Question
from .runs import PLAIN, PromptRun, SystemRun, answer
from .warmup import WarmUp


class Deliveries(BaseStreamer):
    """
    When tokens came out of one `generate` call, and how many at a time.

    Attributes:
        seconds (`list[float]`): Since this object was made, one per delivery. sizes (`list[int]`): Tokens of each.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._prompt_came = False
        self.seconds: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: first with the prompt, then with new tokens."""
        if self._prompt_came:
            self.seconds.append(time.perf_counter() - self._start)
            self.sizes.append(value.numel())
        self._prompt_came = True

    def end(self) -> None:
        """Called by `generate` at the end."""

    def statistics(self) -> DecodingStatistics:
        """
        The rounds of stock assisted generation, which delivers once per target forward.

        Its first forward is the prefill, so it is no round, whatever it delivered. Whether a cut last round had a bonus
        token is not told; its last token is counted as one, which leaves τ as it is.
        """
        counts = DecodingStatistics(runs=1, target_forwards=1, emitted_tokens=sum(self.sizes[:1]))
        for size in self.sizes[1:]:
            counts.add_rounds([(size - 1, True)], 0)
        return counts


@dataclass
class Measured(PromptRun):
    """
    One answer and its sums.

    Attributes:
        set (`str`): Question set. counts ([`Counts`]): Of this answer.
    """

    set: str = ""
    counts: Counts = field(default_factory=Counts)

    def plain_dict(self) -> dict[str, Any]:
        """Tokens, seconds and decoding counts, as JSON values."""
        statistics = None if self.statistics is None else asdict(self.statistics)
        return {"tokens": self.tokens, "seconds": self.seconds, "statistics": statistics}


@dataclass(frozen=True)
class Detail:
    """
    What is measured beside tokens and seconds.

    Attributes:
        time_split (`bool`): Who spends the seconds of a round, within the timed call. On an accelerator this waits for the
            device between the parts of a round, which costs a draft a little of its speed.
        trees (`bool`): Trees and greedy paths, in a second call per answer of a draft.
    """

    time_split: bool = False
    trees: bool = False


TIMES_ALONE = Detail()


@contextmanager
def _tree_of(system: System) -> Iterator[None]:
    """Within it the system's draft has the system's tree."""
    draft = system.kwargs.get("assistant_model")
    if system.tree is None:
        yield
        return
    before = draft.tree
    draft.tree = system.tree
    try:
        yield
    finally:
        draft.tree = before


def measure_answer(
    target: Any,
    prompt: list[int],
    system: System,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    detail: Detail = TIMES_ALONE,
) -> Measured:
    """
    Answer one prompt with one system, timed, and make the sums.

    Args:
        target (`PreTrainedModel`), prompt (`list[int]`), system ([`System`]): Who answers what.
        temperature (`float`), max_new_tokens (`int`), seed (`int`), *optional*: As in [`answer`].
        detail ([`Detail`], *optional*): What else is measured.
    """
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, **system.kwargs}
    with _tree_of(system):
        deliveries = Deliveries()
        with record_rounds(trees=False, seconds=detail.time_split) as recorder:
            run = answer(target, prompt, streamer=deliveries, **options)
        stock = run.statistics is None and (set(system.kwargs) & {"assistant_model", "prompt_lookup_num_tokens"})
        statistics = deliveries.statistics() if stock else run.statistics
        rounds = statistics.rounds if statistics is not None else 0
        counts = Counts(
            statistics=statistics or DecodingStatistics(),
            answers=1,
            tokens=len(run.tokens),
            seconds=run.seconds,
            first_seconds=deliveries.seconds[0],
            first_tokens=deliveries.sizes[0],
            tau_sum=statistics.tau if rounds else 0.0,
            tau_answers=int(rounds > 0),
        )
        counts.add_times(recorder.times)
        if detail.trees and run.statistics is not None:
            with record_rounds() as recorder:
                answer(target, prompt, **options)
            counts.add_traces(recorder.rounds, end_tokens(target))
    return Measured(run.tokens, run.seconds, statistics, counts=counts)


def end_tokens(target: Any) -> list[int]:
    """Tokens that end the target's texts."""
    found = target.generation_config.eos_token_id
    found = text_config(target).eos_token_id if found is None else found
    return found if isinstance(found, list) else [] if found is None else [found]


class _Kept:
    """Answers that a file holds, and the file that new ones go to (or none)."""

    def __init__(self, file: AnswerFile | None) -> None:
        self._file = file
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        if file is not None and file.done:
            for row in load_jsonl(file.path):
                self._rows[(row["id"], row["answer"])] = row

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, key: str, number: int) -> Measured | None:
        """The answer, if there is one."""
        row = self._rows.get((key, number))
        if row is None:
            return None
        counts = Counts.from_dict(row["counts"])
        rounds = counts.statistics if counts.statistics.runs else None
        return Measured(row["tokens"], counts.seconds, rounds, row["set"], counts)

    def add(self, key: str, number: int, made: Measured) -> None:
        """Keep a new answer."""
        if self._file is None:
            return
        row = {"id": key, "answer": number, "last": True, "set": made.set}
        self._file.append([{**row, "tokens": made.tokens, "counts": made.counts.to_dict()}])


def measure(
    target: Any,
    tokenizer: Any,
    questions: list[Question],
    systems: list[System],
    *,
    temperatures: tuple[float, ...] = (0.0,),
    max_new_tokens: int = 128,
    seed: int = 0,
    detail: Detail = TIMES_ALONE,
    file: AnswerFile | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[SystemRun]:
    """
    Answer every question with every system, one after the other for each prompt, in rotating order.

    Later turns continue from the first system's answers, so all systems answer the same prompts.

    Args:
        target (`PreTrainedModel`), tokenizer: Model and its tokenizer.
        questions (`list[Question]`): Each turn is one prompt.
        systems (`list[System]`): The first one is plain generation.
        temperatures (`tuple[float, ...]`, *optional*, defaults to `(0.0,)`): 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to `128`): Longest answer.
        seed (`int`, *optional*, defaults to `0`): Prompt `i` is sampled with `seed + i` by every system.
        detail ([`Detail`], *optional*): What is measured beside tokens and seconds.
        file ([`AnswerFile`], *optional*): Holds the answers of an interrupted run, and gets every new one at once.
        template_kwargs (`Mapping`, *optional*): Variables for the chat template.

    Returns:
        `list[SystemRun]`: For each temperature the systems in order; their answers are [`Measured`].
    """
    kept = _Kept(file)
    total = len(temperatures) * len(systems) * sum(len(q.turns) for q in questions)
    options = {"max_new_tokens": max_new_tokens, "detail": detail}
    warm_up = WarmUp(lambda system, prompt: measure_answer(target, prompt, system, max_new_tokens=max_new_tokens))
    results = []
    with tqdm(total=total, initial=len(kept), desc="answers", unit="answer") as bar:
        for temperature in temperatures:
            runs = {system.name: SystemRun(system.name, temperature) for system in systems}
            for question in questions:
                said: list[str] = []
                for turn in range(len(question.turns)):
                    prompt = render_prompt(tokenizer, question.messages(turn, said), **(template_kwargs or {}))
                    number = len(runs[systems[0].name].answers)
                    first = number % len(systems)
                    for system in [*systems[first:], *systems[:first]]:
                        key = f"{temperature:g}|{system.name}"
                        made = kept.find(key, number)
                        if made is None:
                            warm_up(systems, prompt)
                            made = measure_answer(
                                target, prompt, system, temperature=temperature, seed=seed + number, **options
                            )
                            made.set = question.set
                            kept.add(key, number, made)
                            bar.update()
                        runs[system.name].answers.append(made)
                    plain = runs[systems[0].name].answers[-1]
                    said.append(tokenizer.decode(plain.tokens, skip_special_tokens=True))
            results.extend(runs.values())
    return results


def compare(
    target: Any,
    tokenizer: Any,
    questions: list[Question],
    drafts: Mapping[str, Any],
    *,
    temperatures: tuple[float, ...] = (0.0,),
    max_new_tokens: int = 128,
    seed: int = 0,
) -> list[SystemRun]:
    """
    [`measure`] for plain `generate` and drafts.

    Args:
        target, tokenizer, questions, temperatures, max_new_tokens, seed: As in [`measure`].
        drafts (`Mapping[str, DraftModel]`): Name to draft.

    Returns:
        `list[SystemRun]`: For each temperature plain generation first, then the drafts in order.
    """
    systems = [System(PLAIN), *(System(name, {"assistant_model": draft}) for name, draft in drafts.items())]
    return measure(
        target,
        tokenizer,
        questions,
        systems,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
