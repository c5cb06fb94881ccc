# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation as JSON and Markdown: counts first, ratios last. Level 5."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .counts import Counts
from .runs import PLAIN, SystemRun
from .session import Measured


@dataclass(frozen=True)
class Result:
    """
    One system at one temperature on some prompts.

    Attributes:
        system (`str`), temperature (`float`): Who. set (`str`): Question set; `"all"` for all of them.
        counts ([`Counts`]): Summed over its answers. plain ([`Counts`]): Of plain generation on the same prompts.
        identical (`int`): Answers that are plain generation's, token for token.
        repetition (`float`): See [`SystemRun.repetition`].
    """

    system: str
    temperature: float
    set: str
    counts: Counts
    plain: Counts
    identical: int
    repetition: float

    @property
    def speedup(self) -> float:
        """SR, prefill included."""
        return self.counts.tokens_per_second / self.plain.tokens_per_second

    @property
    def speedup_after_prefill(self) -> float:
        """SR of what comes after the first tokens; NaN where nothing does."""
        return self.counts.tokens_per_second_after_prefill / self.plain.tokens_per_second_after_prefill

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the sums, and the ratios made of them."""
        after = self.speedup_after_prefill
        ratios = {"speedup": self.speedup, "speedup_after_prefill": None if after != after else after}
        return {
            "system": self.system,
            "temperature": self.temperature,
            "set": self.set,
            "counts": self.counts.to_dict(),
            "figures": {**ratios, **self.counts.figures(), "repeated_4_grams": self.repetition},
            "identical_to_plain": self.identical,
        }


def summarize(runs: list[SystemRun]) -> list[Result]:
    """For every run all prompts together and, where there are several question sets, each of them."""
    results = []
    plains = {run.temperature: run for run in runs if run.name == PLAIN}
    for run in runs:
        sets = list(dict.fromkeys(answer.set for answer in run.answers))
        for name in ["all", *(sets if len(sets) > 1 else [])]:
            which = [i for i, answer in enumerate(run.answers) if name in ("all", answer.set)]
            mine = SystemRun(run.name, run.temperature, [run.answers[i] for i in which])
            base = SystemRun(PLAIN, run.temperature, [plains[run.temperature].answers[i] for i in which])
            counts, plain = _total(mine.answers), _total(base.answers)
            found = Result(run.name, run.temperature, name, counts, plain, mine.identical(base), mine.repetition())
            results.append(found)
    return results


def write_report(folder: Path, results: list[Result], settings: dict[str, Any], sets: list[str]) -> None:
    """
    `results.json` and `results.md` in an existing folder.

    Args:
        folder (`Path`): Where. results (`list[Result]`): From [`summarize`]. settings (`dict`): What a figure must be read
            with. sets (`list[str]`): A line on every question set.
    """
    data = {"settings": settings, "sets": sets, "results": [result.to_dict() for result in results]}
    (folder / "results.json").write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / "results.md").write_text(report_text(results, settings, sets), encoding="utf-8")


def report_text(results: list[Result], settings: dict[str, Any], sets: list[str]) -> str:
    """The whole report as Markdown; arguments as in [`write_report`]."""
    whole = [result for result in results if result.set == "all"]
    lines = ["# Evaluation", "", "## Results", "", _table(whole, MAIN), ""]
    if len(whole) < len(results):
        parts = [result for result in results if result.set != "all"]
        lines += ["## By question set", "", _table(parts, BY_SET), ""]
    drafted = [result for result in whole if result.counts.statistics.rounds]
    if drafted:
        lines += ["## Acceptance by depth", "", "Share of all rounds, and of those that got one token less far.", ""]
        lines += [_depths(drafted), ""]
    traced = [result for result in whole if result.counts.traced_rounds]
    if traced:
        lines += ["## Tree and greedy path", "", _table(traced, TREES), ""]
    timed = [result for result in whole if result.counts.round_seconds]
    if timed:
        lines += ["## Time of a round", "", _table(timed, TIMES), ""]
    lines += ["## Question sets", "", *(f"- {line}" for line in sets), ""]
    lines += ["## Settings", "", *(f"- {name}: {_plain(value)}" for name, value in settings.items()), ""]
    lines += ["Definitions: `docs/measuring.md` of gto-hf. τ counts the bonus token.", ""]
    return "\n".join(lines)


def _total(answers: list[Measured]) -> Counts:
    return sum((answer.counts for answer in answers), Counts())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.0f} %"


Columns = dict[str, Callable[[Result], str]]
WHO: Columns = {"T": lambda r: f"{r.temperature:g}", "system": lambda r: r.system.replace("|", "\\|")}
SPEED: Columns = {
    "tokens/s": lambda r: _number(r.counts.tokens_per_second, 1),
    "SR": lambda r: _number(r.speedup),
    "SR after prefill": lambda r: _number(r.speedup_after_prefill),
    "τ (macro)": lambda r: _number(r.counts.tau_macro),
    "τ (micro)": lambda r: _number(r.counts.tau_micro),
}
MAIN: Columns = {
    **WHO,
    **SPEED,
    "without bonus": lambda r: _number(r.counts.tau_without_bonus),
    "rounds": lambda r: str(r.counts.statistics.rounds or "-"),
    "to first token": lambda r: f"{1000 * r.counts.first_seconds / r.counts.answers:.0f} ms",
    "repeated 4-grams": lambda r: _percent(r.repetition),
    "same text": lambda r: "-" if r.system == PLAIN else f"{r.identical} of {r.counts.answers}",
}
BY_SET: Columns = {**WHO, "set": lambda r: r.set, "answers": lambda r: str(r.counts.answers), **SPEED}
TREES: Columns = {
    **WHO,
    "greedy path pruned": lambda r: _percent(r.counts.figures()["greedy_path_pruned"]),
    "accepted path is greedy": lambda r: _percent(r.counts.figures()["accepted_is_greedy"]),
    "accepted, greedy path": lambda r: _number(r.counts.greedy_accepted),
    "accepted, tree": lambda r: _number(r.counts.observed),
    "expected at T = 1": lambda r: _number(r.counts.expected),
    "τ of a chain (simulated)": lambda r: _number(r.counts.tau_chain),
}
TIMES: Columns = {
    **WHO,
    "ms per round": lambda r: _number(1000 * r.counts.round_seconds / r.counts.statistics.rounds, 1),
    **{
        part: lambda r, part=part: _percent(r.counts.figures()[f"{part}_share"])
        for part in ("target", "draft", "processor", "host")
    },
}


def _table(results: list[Result], columns: Columns) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(result) for cell in columns.values()) + " |" for result in results]
    return "\n".join(lines)


def _depths(results: list[Result]) -> str:
    rates = {}
    for result in results:
        statistics = result.counts.statistics
        both = zip(statistics.acceptance_by_depth(), statistics.acceptance_by_depth(conditional=True), strict=True)
        rates[id(result)] = [f"{_number(a)}, {_number(b)}" for a, b in both]
    depth = max(len(cells) for cells in rates.values())
    columns = {
        str(k + 1): lambda r, k=k: rates[id(r)][k] if k < len(rates[id(r)]) else "-" for k in range(min(depth, 12))
    }
    return _table(results, {**WHO, **columns})
