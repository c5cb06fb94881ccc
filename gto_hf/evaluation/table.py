# SPDX-License-Identifier: Apache-2.0
"""Results as a Markdown table. Level 5."""

from __future__ import annotations

from .runs import PLAIN, SystemRun


def results_table(runs: list[SystemRun]) -> str:
    """
    Markdown table of [`compare`] results: one row per system and temperature.

    SR is against plain generation at the same temperature; tau counts the bonus token; the last columns say how much
    the text repeats itself and how many answers equal plain generation's.
    """
    rows = [
        "| T | system | tokens/s | SR | τ (macro) | τ (micro) | repeated 4-grams | same text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain: dict[float, SystemRun] = {run.temperature: run for run in runs if run.name == PLAIN}
    for run in runs:
        base = plain[run.temperature]
        drafted = run is not base
        cells = [
            f"{run.temperature:g}",
            run.name,
            f"{run.tokens_per_second:.1f}",
            f"{run.speedup(base):.2f}",
            *(
                "1.00" if not drafted else "-" if tau != tau else f"{tau:.2f}"
                for tau in (run.tau_macro, run.tau_micro)
            ),
            f"{100 * run.repetition():.0f} %",
            f"{run.identical(base)} of {len(run.answers)}" if drafted else "-",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
