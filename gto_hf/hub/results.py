# SPDX-License-Identifier: Apache-2.0
"""What `gto-hf eval --output` measured, as far as a card needs it. Level 5."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gto_hf.tree import TreeConfig


PLAIN = "plain generate"  # what `gto-hf eval` calls generation without a draft
TREES = "trees (root excluded)"


@dataclass(frozen=True)
class Measured:
    """
    One tree of a draft at one temperature, against plain generation of the same prompts in the same run.

    Attributes:
        tree (`dict[str, int]`): `depth`, `top_k`, `total_tokens` (root excluded).
        temperature (`float`): 0 is greedy.
        tau_macro, tau_micro (`float`): Acceptance length, bonus token counted.
        speedup (`float`): SR: tokens per second over plain generation, prefill included.
        tokens_per_second (`float`): Of the draft.
        by_depth (`tuple[float, ...]`): Share of the rounds in which the drafted token at depth 1, 2, .. was emitted.
        prompts (`int`): Prompts answered.
        settings (`dict`): What the figures must be read with.
    """

    tree: dict[str, Any]
    temperature: float
    tau_macro: float
    tau_micro: float
    speedup: float
    tokens_per_second: float
    by_depth: tuple[float, ...]
    prompts: int
    settings: dict[str, Any]

    @property
    def kind(self) -> str:
        """`"chain"` if every node has at most one child, else `"tree"`."""
        return "chain" if self.tree["top_k"] == 1 else "tree"

    @property
    def shape(self) -> str:
        """The tree in a few characters."""
        auto = ", chosen in every round" if self.tree.get("auto") else ""
        return f"{self.tree['depth']}/{self.tree['top_k']}/{self.tree['total_tokens']}{auto}"


def read_results(
    path: Path, *, system: str | None = None, target: str | None = None, tree: dict[str, Any] | None = None
) -> list[Measured]:
    """
    Read a JSON file of `gto-hf eval --output` (either of its forms).

    Args:
        path (`Path`): The file, or the folder that holds it as `results.json`.
        system (`str`, *optional*): Name of the draft in that run; needed if it measured several.
        target (`str`, *optional*): Hub id of the draft's target.
        tree (`dict`, *optional*): The draft's own tree, with which `gto-hf eval` measures it.

    Returns:
        `list[Measured]`: Every tree and temperature of that draft, in the order of the file.

    Raises:
        ValueError: If it is no such file, measured another target or another tree, or does not say which draft is meant.
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        settings, trees = data["settings"], data["settings"][TREES]
        sums = [*map(_of_run, data.get("runs", ())), *map(_of_result, data.get("results", ()))]
    except OSError as error:
        raise ValueError(f"The results `{path}` cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{path}` is no result of `gto-hf eval --output` ({type(error).__name__}: {error}). Give the JSON file that it "
            "wrote, or its folder."
        ) from error
    named = settings.get("target")
    if target and named and "/" in named and not Path(named).exists() and named[0] not in "./~" and named != target:
        raise ValueError(f"`{path}` was measured with the target `{named}`, but this draft is for `{target}`.")
    if system is None and len(trees) > 1:
        raise ValueError(f"`{path}` measured {len(trees)} drafts ({', '.join(trees)}). Say which one with `--system`.")
    system = next(iter(trees), None) if system is None else system
    if system not in trees:
        raise ValueError(f"`{path}` has no draft called `{system}`; it has {', '.join(trees) or 'none'}.")
    if tree is not None and TreeConfig(**tree) != TreeConfig(**trees[system]):
        raise ValueError(
            f"`{path}` measured `{system}` with the tree {trees[system]}, but this draft's own is {tree}: the figures are another "
            "draft's, or of a tree that it had before. Measure it again."
        )
    plain = {each["temperature"]: each for each in sums if each["name"] == PLAIN}
    found = [_measured(each, tree, plain, settings) for each in sums if (tree := _tree(each["name"], system, trees))]
    found = [each for each in found if each is not None]
    if not found:
        raise ValueError(
            f"`{path}` has no finished round of `{system}` beside plain generation, so nothing was measured."
        )
    return found


def _tree(name: str, system: str, trees: dict[str, Any]) -> dict[str, Any] | None:
    """The tree of a system: the draft's own, or one that was tried with it (`NAME @ depth/top-k/nodes`)."""
    if name == system:
        return trees[system]
    tried = re.fullmatch(re.escape(system) + r" @ (\d+)/(\d+)/(\d+)", name)
    return tried and dict(zip(("depth", "top_k", "total_tokens"), map(int, tried.groups()), strict=True))


def _of_run(run: dict[str, Any]) -> dict[str, Any]:
    """Sums over the answers of a run."""
    answers = run["answers"]
    counts = [a["statistics"] for a in answers if a["statistics"] and a["statistics"]["rounds"]]
    return {
        "name": run["name"],
        "temperature": run["temperature"],
        "prompts": len(answers),
        "tokens": sum(len(a["tokens"]) for a in answers),
        "seconds": sum(a["seconds"] for a in answers),
        "rounds": sum(c["rounds"] for c in counts),
        "bonus": sum(c["bonus_tokens"] for c in counts),
        "histogram": _added([c["accepted_histogram"] for c in counts]),
        "taus": [(_accepted(c["accepted_histogram"]) + c["bonus_tokens"]) / c["rounds"] for c in counts],
    }


def _of_result(result: dict[str, Any]) -> dict[str, Any]:
    """The same from sums that were written; parts of a run (single question sets) are left out by their name."""
    counts, statistics = result["counts"], result["counts"]["statistics"]
    whole = result["set"] == "all"
    return {
        "name": result["system"] if whole else "",
        "temperature": result["temperature"],
        "prompts": counts["answers"],
        "tokens": counts["tokens"],
        "seconds": counts["seconds"],
        "rounds": statistics["rounds"],
        "bonus": statistics["bonus_tokens"],
        "histogram": statistics["accepted_histogram"],
        "taus": [counts["tau_sum"] / counts["tau_answers"]] if counts["tau_answers"] else [],
    }


def _measured(
    sums: dict[str, Any], tree: dict[str, Any], plain: dict[float, dict[str, Any]], settings: dict[str, Any]
) -> Measured | None:
    """Ratios; None if there is nothing to divide by."""
    base = plain.get(sums["temperature"])
    if base is None or not (sums["rounds"] and sums["seconds"] and base["seconds"] and base["tokens"]):
        return None
    histogram, rounds = sums["histogram"], sums["rounds"]
    speed = sums["tokens"] / sums["seconds"]
    return Measured(
        tree=tree,
        temperature=sums["temperature"],
        tau_macro=math.fsum(sums["taus"]) / len(sums["taus"]),
        tau_micro=(_accepted(histogram) + sums["bonus"]) / rounds,
        speedup=speed / (base["tokens"] / base["seconds"]),
        tokens_per_second=speed,
        by_depth=tuple(sum(histogram[depth:]) / rounds for depth in range(1, len(histogram))),
        prompts=sums["prompts"],
        settings=settings,
    )


def _accepted(histogram: list[int]) -> int:
    return sum(length * count for length, count in enumerate(histogram))


def _added(histograms: list[list[int]]) -> list[int]:
    longest = max(map(len, histograms), default=0)
    return [sum(h[i] for h in histograms if i < len(h)) for i in range(longest)]
