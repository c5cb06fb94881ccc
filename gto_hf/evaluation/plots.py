# SPDX-License-Identifier: Apache-2.0
"""The results of an evaluation as pictures (PNG, with matplotlib). Level 5."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from gto_hf.extras import install_hint

from .report import Result


PARTS = ("target", "draft", "processor", "host")
FEWEST = 20  # rounds that a conditional acceptance must rest on to be drawn: of fewer it only zigzags
_TREE = re.compile(r"(.*) @ (\d+)/(\d+)/(\d+)")  # see `systems.draft_systems`
Panels = list[tuple[Any, list[Result]]]


def check_matplotlib() -> None:
    """Raise `ImportError` that says what to install, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Plots need matplotlib: {install_hint('draw')}, or leave them out with `--no-plots`."
        ) from error


def write_plots(folder: Path, results: list[Result], own_trees: dict[str, dict[str, int]]) -> list[Path]:
    """
    One file per question that the results can answer, in an existing folder.

    Args:
        folder (`Path`): Where. results (`list[Result]`): From [`summarize`]. own_trees (`dict`): The trees that drafts have
            of their own, by the draft's name; they stand beside those of `--tree-sizes`.

    Returns:
        `list[Path]`: Of `tau_by_set.png`, `acceptance_by_depth.png`, `time_split.png` and `speedup_by_tree.png` those for
        which something was measured.
    """
    # Trees of `--tree-sizes` have a picture of their own; in the others they would bury the systems.
    drafted = [r for r in results if r.counts.statistics.rounds and not _TREE.fullmatch(r.system)]
    whole = [result for result in drafted if result.set == "all"]
    sized = {result.system: _TREE.fullmatch(result.system) for result in results}
    shapes = {system: (found[1], tuple(map(int, found.groups()[1:]))) for system, found in sized.items() if found}
    for name in {draft for draft, _ in shapes.values()} & set(own_trees):
        shapes[name] = name, tuple(own_trees[name][key] for key in ("depth", "top_k", "total_tokens"))
    trees = [result for result in results if result.set == "all" and result.system in shapes]
    made = {
        "tau_by_set.png": (_tau_by_set, drafted),
        "acceptance_by_depth.png": (_by_depth, [r for r in whole if r.counts.statistics.accepted_tokens]),
        "time_split.png": (_time_split, [result for result in whole if result.counts.round_seconds]),
        "speedup_by_tree.png": (partial(_by_tree, shapes=shapes), trees),
    }
    paths = []
    for name, (draw, some) in made.items():
        if some:
            draw(some).savefig(folder / name, dpi=120)
            paths.append(folder / name)
    return paths


def _panels(results: list[Result], width: float, height: float, *, sharex: bool = False) -> tuple[Any, Panels]:
    """A figure with one panel per temperature, one below the other, and the results that belong into each."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(result.temperature for result in results))
    figure = Figure(figsize=(width, height * len(temperatures) + 0.6), layout="constrained")
    axes = figure.subplots(len(temperatures), 1, squeeze=False, sharex=sharex).flatten()
    panels = []
    for axis, temperature in zip(axes, temperatures, strict=True):
        axis.set_title(f"T = {temperature:g}", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        panels.append((axis, [result for result in results if result.temperature == temperature]))
    return figure, panels


def _legend(figure: Any, panels: Panels) -> Any:
    """Below the panels, where it can hide nothing; returns the figure."""
    found = {}
    for axis, _ in panels:
        found |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = 1 if any(len(label) > 22 for label in found) else min(len(found), 4)
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(found) // columns))
    figure.legend(found.values(), found.keys(), loc="outside lower center", fontsize=8, ncols=columns, frameon=False)
    return figure


def _short(name: str) -> str:
    """A name that fits beside a plot: its end says more than its start."""
    return name if len(name) <= 34 else "…" + name[-33:]


def _draft(result: Result) -> str:
    """The system's name without the tree of `--tree-sizes`."""
    found = _TREE.fullmatch(result.system)
    return found[1] if found else result.system


def _colors(results: list[Result]) -> dict[str, str]:
    """The same color for a system in every panel."""
    names = dict.fromkeys(_draft(result) for result in results)
    return {name: f"C{index % 10}" for index, name in enumerate(names)}


def _tau_by_set(results: list[Result]) -> Any:
    """Bars of macro τ: a group per question set, a bar per system."""
    sets, colors = list(dict.fromkeys(result.set for result in results)), _colors(results)
    width, narrow = 0.8 / len(colors), len(sets) * len(colors) > 16
    figure, panels = _panels(results, min(max(5.5, 0.32 * len(sets) * len(colors)), 16), 2.6)
    for axis, some in panels:
        taus = {(result.system, result.set): result.counts.tau_macro for result in some}
        for index, (name, color) in enumerate(colors.items()):
            heights = [taus.get((name, each), float("nan")) for each in sets]
            places = [place + (index - (len(colors) - 1) / 2) * width for place in range(len(sets))]
            bars = axis.bar(places, heights, width * 0.92, color=color, label=_short(name))
            axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=2, rotation=90 if narrow else 0)
        axis.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
        axis.margins(y=0.2)
        turned = max(len(each) for each in sets) > 10 and len(sets) > 3
        axis.set_xticks(range(len(sets)), sets, rotation=30 if turned else 0, ha="right" if turned else "center")
        axis.set_ylabel("τ (macro)", fontsize=8)
    return _legend(figure, panels)


def _by_depth(results: list[Result]) -> Any:
    """Lines of unconditional (full) and conditional (dotted) acceptance over depth."""
    colors = _colors(results)
    figure, panels = _panels(results, 5.5, 2.8, sharex=True)
    for axis, some in panels:
        for result in some:
            statistics, color = result.counts.statistics, colors[result.system]
            whole, step = statistics.acceptance_by_depth(), statistics.acceptance_by_depth(conditional=True)
            depths = range(1, len(whole) + 1)
            histogram = statistics.accepted_histogram
            sure = sum(sum(histogram[depth - 1 :]) >= FEWEST for depth in depths)  # rounds only get fewer with depth
            axis.plot(depths, whole, marker="o", markersize=3, color=color, label=_short(result.system))
            axis.plot(depths[:sure], step[:sure], marker=".", markersize=3, color=color, linestyle=":", linewidth=1)
        axis.set_ylim(0, 1.04)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel("accepted", fontsize=8)
    panels[-1][0].set_xlabel(
        f"depth (full: of all rounds; dotted: of rounds that got one less far, if at least {FEWEST} did)", fontsize=8
    )
    return _legend(figure, panels)


def _time_split(results: list[Result]) -> Any:
    """Lying bars: milliseconds of a mean round, by who spent them."""
    rows = len({result.system for result in results})
    figure, panels = _panels(results, 6.0, 0.7 + 0.35 * rows, sharex=True)
    for axis, some in panels:
        names, left = [_short(result.system) for result in some], [0.0] * len(some)
        for part in PARTS:
            lengths = [_milliseconds(result, part) for result in some]
            axis.barh(names, lengths, 0.65, left=left, label={"processor": "choosing tokens"}.get(part, part))
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        axis.invert_yaxis()
    panels[-1][0].set_xlabel("milliseconds per round", fontsize=8)
    return _legend(figure, panels)


def _milliseconds(result: Result, part: str) -> float:
    counts = result.counts
    return 1000 * counts.round_seconds * counts.figures()[f"{part}_share"] / counts.statistics.rounds


def _by_tree(results: list[Result], shapes: dict[str, tuple[str, tuple[int, ...]]]) -> Any:
    """SR over the nodes of the tree, one line per draft; `shapes` has draft and tree of every system."""
    ticks: dict[int, dict[str, None]] = {}
    lines: dict[tuple[float, str], list[tuple[int, float]]] = {}
    for result in results:
        draft, (depth, top_k, nodes) = shapes[result.system]
        ticks.setdefault(nodes, {})[f"{depth}/{top_k}/{nodes}"] = None
        lines.setdefault((result.temperature, draft), []).append((nodes, result.speedup))
    colors = _colors(results)
    figure, panels = _panels(results, 5.5, 2.6)
    for axis, some in panels:
        for name, color in colors.items():
            points = sorted(lines[(some[0].temperature, name)])
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=_short(name))
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(ticks), ["\n".join(names) for names in ticks.values()], rotation=30, ha="right")
        axis.minorticks_off()
        axis.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
        axis.set_ylabel("SR, prefill included", fontsize=8)
    panels[-1][0].set_xlabel("tree: depth / top-k / nodes", fontsize=8)
    return _legend(figure, panels)
