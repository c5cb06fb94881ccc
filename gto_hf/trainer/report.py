# SPDX-License-Identifier: Apache-2.0
"""
The report in the run's folder: every logged quantity as CSV, a short table, plots where matplotlib is installed. Level 6.

It is made anew each time from `state.log_history`, which checkpoints hold, so a resumed run shows its whole history.
"""

from __future__ import annotations

import csv
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from gto_hf.extras import install_hint

from .gto_config import GTOConfig


logger = logging.get_logger(__name__)

_EVAL = r"eval(_.+)?_"
# Title of a panel -> what it shows.
PANELS = {
    "loss": rf"(loss|token_loss|{_EVAL}(token_)?loss)",
    "tree reward": r"reward/(draft|reference)",
    "expected acceptance (tokens)": r"expected_acceptance/(draft|reference)",
    "acceptance length τ": rf"(tau_simulated|{_EVAL}tau(_chain)?)",
    "clip fraction": r"gto/clip_fraction",
    "ratio": r"gto/ratio",
}
_TABLE = re.compile(rf"{_EVAL}(tau(_chain)?|(token_)?loss)")


class ReportCallback(TrainerCallback):
    """
    Writes `output_dir/report` at every evaluation, at every save and at the end, on the main process, unless
    `args.report` is false.

    A report must not end a training: if it cannot be written, that is a warning. It adds `train_seconds` to the training
    entries of `state.log_history`: the time of the interval's optimizer steps, without evaluation, saving and reading
    data.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None
        self._said: set[str] = set()

    def on_step_begin(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the clock."""
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None

    def on_log(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the seconds beside the tokens that were trained in them."""
        if args.report and state.log_history and "trained_tokens" in state.log_history[-1]:
            state.log_history[-1]["train_seconds"] = round(self._seconds, 3)
            self._seconds = 0.0

    def on_evaluate(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write."""
        self._write(args, state)

    def on_save(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write."""
        self._write(args, state)

    def on_train_end(self, args: GTOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write."""
        self._write(args, state)

    def _write(self, args: GTOConfig, state: TrainerState) -> None:
        if not args.report or not state.is_world_process_zero:
            return
        rows = merged_rows(state.log_history)
        folder = Path(args.output_dir) / "report"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / "metrics.csv", lambda path: _write_csv(rows, path))
            table = report_table(rows, args.metric_for_best_model, args.greater_is_better)
            _replace(folder / "table.md", lambda path: path.write_text(table, encoding="utf-8"))
            _replace(folder / "training.png", lambda path: draw_training(rows, path))
        except ImportError:
            self._once(logger.info, f"No plots in the report: matplotlib is not installed ({install_hint('draw')}).")
        except OSError as error:
            self._once(warnings.warn, f"The report in `{folder}` could not be written: {error}")

    def _once(self, say: Callable[[str], None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(message)


def merged_rows(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """
    One row per logged step, `step` first: what training and every evaluation set logged there. Numbers only.

    Args:
        history (`list[dict]`): `state.log_history`.
    """
    rows: dict[int, dict[str, float]] = {}
    for entry in history:
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        rows.setdefault(entry["step"], {"step": entry["step"]}).update(numbers)
    return [rows[step] for step in sorted(rows)]


def best_row(
    rows: list[dict[str, float]], metric: str | None, greater: bool | None
) -> tuple[str, dict[str, float]] | None:
    """
    Where the run was best: the first row with the best value of a metric, as the trainer decides it.

    Args:
        rows (`list[dict]`): See [`merged_rows`].
        metric (`str`, *optional*): `metric_for_best_model`; defaults to the first acceptance length there is.
        greater (`bool`, *optional*): `greater_is_better`.

    Returns:
        Name of the metric and its row; None if nothing was measured.
    """
    if metric is None:
        metric, greater = next((n for row in rows for n in row if re.fullmatch(rf"{_EVAL}tau", n)), None), True
    elif not metric.startswith("eval_"):
        metric = f"eval_{metric}"
    measured = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    if not measured:
        return None
    return metric, (max if greater else min)(measured, key=lambda row: row[metric])


def report_table(rows: list[dict[str, float]], metric: str | None, greater: bool | None) -> str:
    """Markdown: length and speed of the run, its best step, and what every evaluation measured. Arguments as in
    [`best_row`]."""
    trained = sum(row.get("trained_tokens", 0) for row in rows)
    timed = [row for row in rows if row.get("train_seconds", 0) > 0]
    seconds = sum(row["train_seconds"] for row in timed)
    best = best_row(rows, metric, greater)
    facts = [("steps", str(int(rows[-1]["step"])) if rows else "0"), ("trained tokens", f"{trained:,.0f}")]
    if seconds:
        speed = sum(row["trained_tokens"] for row in timed) / seconds
        facts.append(("trained tokens per second, within optimizer steps", f"{speed:,.0f}"))
    if best is not None:
        name, row = best
        facts.append(("best step", f"{row['step']:.0f}, `{name}` {_cell(row[name])}"))
    lines = ["# Training report", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    names = list(dict.fromkeys(name for row in rows for name in row if _TABLE.fullmatch(name)))
    names.sort(key=lambda name: "tau" not in name)
    if not names:
        return "\n".join([*lines, "Nothing was evaluated yet.", ""])
    lines += ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        if not any(name in row for name in names):
            continue
        cells = [f"{row['step']:.0f}", *(_cell(row.get(name)) for name in names)]
        chosen = best is not None and row is best[1]
        lines.append("| " + " | ".join(f"**{cell}**" if chosen else cell for cell in cells) + " |")
    return "\n".join([*lines, ""])


def draw_training(rows: list[dict[str, float]], path: Path) -> None:
    """
    One small panel for each of [`PANELS`] that the run has logged, over the step, as a PNG file; none if there is none.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    panels = {}
    for title, pattern in PANELS.items():
        names = dict.fromkeys(name for row in rows for name in row if re.fullmatch(pattern, name))
        if names:
            panels[title] = list(names)
    if not panels:
        return
    columns = min(3, len(panels))
    figure = Figure(figsize=(4 * columns, 3 * math.ceil(len(panels) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flatten()
    for axis, (title, names) in zip(axes, panels.items(), strict=False):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            marker = "o" if name.startswith("eval") or len(points) == 1 else None
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=name)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, format="png", dpi=120)


def _cell(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _write_csv(rows: list[dict[str, float]], path: Path) -> None:
    names = list(dict.fromkeys(["step", "epoch", *(name for row in rows for name in row)]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path` and move into place, so that a reader or a crash never sees half a file."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        write(draft)
        if draft.exists():
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
