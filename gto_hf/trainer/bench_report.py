# SPDX-License-Identifier: Apache-2.0
"""What `gto-hf bench train` prints and writes. Level 6."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from .bench import PHASE_I, PHASE_II, ModeResult, NaiveResult


# What a whole step and its trees are meant to cost: at most so many steps of Phase I at this length, and at least so many times
# less than the naive loop.
AIM_LENGTH, AIM_RATIO, AIM_FACTOR = 2048, 2.5, 10

_PART_WORDS = {
    "target": "the target's forward over the rows",
    "trees": "growing trees",
    "scoring": "the target on tree nodes",
    "paths": "the reference's view of accepted paths",
    "draft": "the draft's forward with gradient",
    "backward": "backward and optimizer",
    "other": "the rest",
}


def steps_table(results: list[ModeResult]) -> str:
    """Steps of every mode and length as Markdown; times are medians, shares are of all timed steps."""
    parts = list(_PART_WORDS)
    head = ["length", "mode", "s/step", "× Phase I [min, max]", "tokens/s", "trees/s", "target tokens/row", "naive"]
    head += [f"{part} %" for part in parts] + ["peak MB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        shares = result.shares()
        cells = [str(result.length), result.mode.name, f"{result.seconds:.3g}"]
        cells += [str(result.over(_find(results, result.length, PHASE_I))), f"{result.tokens_per_second:.1f}"]
        cells += [f"{result.trees_per_second:.1f}" if result.mode.grown_trees else "-"]
        cells += [f"{result.target_tokens:.0f}", f"{result.naive_target_tokens:.0f}"]
        cells += [f"{100 * shares[part]:.0f}" for part in parts]
        cells.append(f"{result.peak_memory / 2**20:.0f}" if result.peak_memory else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def naive_table(results: list[ModeResult], naive: list[NaiveResult]) -> str:
    """The naive loop beside Phase II as Markdown, by length."""
    head = "| length | roots timed, of | roots/s | trees/s | s for a step's trees | here | factor, trees [min, max] | factor, step |"
    lines = [head + " largest difference |", "|" + "---|" * 9]
    for slow in naive:
        fast = _find(results, slow.length, PHASE_II)
        trees, step = slow.factors(fast)
        own = [s.parts["trees"] + s.parts["scoring"] for s in fast.steps]
        cells = [str(slow.length), f"{slow.rounds[0].roots}, {slow.rounds[0].step_roots}"]
        cells += [f"{slow.roots_per_second:.2f}", f"{2 * slow.roots_per_second:.2f}"]
        cells += [f"{median(slow.whole()):.3g}", f"{median(own):.3g}", str(trees), str(step)]
        lines.append("| " + " | ".join([*cells, f"{slow.difference:.2g}"]) + " |")
    return "\n".join(lines)


def in_words(results: list[ModeResult], naive: list[NaiveResult]) -> str:
    """What dominates a step of Phase II at every length, and how the aims are met."""
    lines = []
    for slow in naive:
        fast, base = (_find(results, slow.length, name) for name in (PHASE_II, PHASE_I))
        ranked = sorted(fast.shares().items(), key=lambda item: -item[1])
        largest, second = (f"{_PART_WORDS[name]} ({100 * share:.0f} %)" for name, share in ranked[:2])
        trees, step = slow.factors(fast)
        aim = f" (aim: at most {AIM_RATIO})" if slow.length == AIM_LENGTH else ""
        lines.append(
            f"{slow.length} tokens: a step of Phase II takes {fast.over(base)} times a step of Phase I{aim}. What dominates it "
            f"is {largest}, then {second}. The target reads {fast.target_tokens:.0f} tokens per row instead of "
            f"{fast.naive_target_tokens:.0f}. The naive loop takes {trees} times as long for the trees and their scores (aim: "
            f"at least {AIM_FACTOR}), {step} times for the whole step; rewards differ by at most {slow.difference:.2g}."
        )
    lines.append(
        "Ratios are medians of rounds with the smallest and largest one. The naive loop's time is extrapolated linearly from "
        "the roots that were timed to all roots of a step."
    )
    return "\n".join(lines)


def as_json(results: list[ModeResult], naive: list[NaiveResult], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, raw, and the figures of the tables."""
    steps, loops = [], []
    for result in results:
        figures = {
            "seconds": result.seconds,
            "over Phase I": asdict(result.over(_find(results, result.length, PHASE_I))),
            "tokens per second": result.tokens_per_second,
            "trees per second": result.trees_per_second,
            "target tokens per row": result.target_tokens,
            "naive target tokens per row": result.naive_target_tokens,
            "shares": result.shares(),
        }
        steps.append({**asdict(result), "figures": figures})
    for slow in naive:
        trees, step = slow.factors(_find(results, slow.length, PHASE_II))
        figures = {
            "roots per second": slow.roots_per_second,
            "seconds of a step's trees, extrapolated": slow.whole(),
            "factor, trees": asdict(trees),
            "factor, step": asdict(step),
            "largest difference": slow.difference,
        }
        loops.append({**asdict(slow), "figures": figures})
    return {"settings": settings, "steps": steps, "naive": loops}


def _find(results: list[ModeResult], length: int, name: str) -> ModeResult:
    return next(r for r in results if r.length == length and r.mode.name == name)
