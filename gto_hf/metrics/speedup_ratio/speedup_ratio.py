# SPDX-License-Identifier: Apache-2.0
"""
Speed-up ratio SR over a baseline, for `evaluate.load`. Level 0: a script of its own.

It is copied elsewhere when it is loaded, also where gto-hf is not installed, so it imports nothing of it.
"""

import math
import statistics

import datasets
import evaluate


_DESCRIPTION = """
Speed-up ratio SR: tokens per second over those of a baseline (plain generation of the same target) on the same prompts, on
the same machine, in the same run.
"""

_KWARGS_DESCRIPTION = """
Args:
    tokens (`list[int]`), seconds (`list[float]`): New tokens and wall clock of each prompt.
    baseline_tokens (`list[int]`), baseline_seconds (`list[float]`): Of the baseline on the same prompts, in the same order.
        Leave the prefill in or out on both sides, and say which.

Returns:
    `dict[str, float]`: `speedup` (ratio of total tokens per second), `speedup_paired` (geometric mean of the prompts' own
    ratios) with `low` and `high`, its 95 % interval (normal, on logarithms; NaN for one prompt), and `prompts`. NaN without
    a prompt.

Examples:
    >>> sr = evaluate.load("gto_hf/metrics/speedup_ratio")
    >>> sr.compute(tokens=[8, 4], seconds=[1.0, 1.0], baseline_tokens=[8, 4], baseline_seconds=[2.0, 2.0])["speedup"]
    2.0
"""

_CITATION = """
@inproceedings{leviathan2023fast,
  title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={International Conference on Machine Learning},
  year={2023}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class SpeedupRatio(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = {
            "tokens": datasets.Value("int64"),
            "seconds": datasets.Value("float64"),
            "baseline_tokens": datasets.Value("int64"),
            "baseline_seconds": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(self, tokens: list, seconds: list, baseline_tokens: list, baseline_seconds: list) -> dict:
        rows = list(zip(tokens, seconds, baseline_tokens, baseline_seconds, strict=True))
        for number, row in enumerate(rows):
            if not all(math.isfinite(value) and value > 0 for value in row):
                raise ValueError(
                    f"Prompt {number} has {row[0]} tokens in {row[1]} s against {row[2]} in {row[3]} s: all must be above 0. "
                    "Leave out prompts that gave nothing, on both sides."
                )
        if not rows:
            return dict.fromkeys(("speedup", "speedup_paired", "low", "high"), float("nan")) | {"prompts": 0}
        logs = [math.log(a / b) - math.log(c / d) for a, b, c, d in rows]
        mean = statistics.fmean(logs)
        half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else float("nan")
        return {
            "speedup": (sum(tokens) / sum(seconds)) / (sum(baseline_tokens) / sum(baseline_seconds)),
            "speedup_paired": math.exp(mean),
            "low": math.exp(mean - half),
            "high": math.exp(mean + half),
            "prompts": len(rows),
        }
