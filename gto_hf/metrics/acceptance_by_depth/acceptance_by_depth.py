# SPDX-License-Identifier: Apache-2.0
"""
Acceptance of drafted tokens by depth, for `evaluate.load`. Level 0: a script of its own.

It is copied elsewhere when it is loaded, also where gto-hf is not installed, so it imports nothing of it.
"""

import datasets
import evaluate


_DESCRIPTION = """
How often the drafted token at depth 1, 2, .. is accepted: of all rounds (`unconditional`, what serving engines print) and of
the rounds that accepted the token before it (`conditional`, the n-α of EAGLE's papers). The two differ a lot: always say which.
"""

_KWARGS_DESCRIPTION = """
Args:
    histograms (`list[list[int]]`): One histogram per answer: entry `i` counts the rounds that emitted `i` drafted tokens
        (`output.statistics.accepted_histogram` of gto-hf). They are added up.

Returns:
    `dict`: `unconditional` and `conditional` (`list[float]`, one entry per depth, up to the deepest one reached), and
    `tau_without_bonus`, the sum of the unconditional ones. Empty lists and NaN without a round.

Examples:
    >>> by_depth = evaluate.load("gto_hf/metrics/acceptance_by_depth")
    >>> by_depth.compute(histograms=[[1, 0, 2, 1]])["unconditional"]
    [0.75, 0.75, 0.25]
"""

_CITATION = """
@article{li2025eagle3,
  title={EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test},
  author={Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
  journal={arXiv preprint arXiv:2503.01840},
  year={2025}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceByDepth(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"histograms": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, histograms: list) -> dict:
        for number, histogram in enumerate(histograms):
            if min(histogram, default=0) < 0:
                raise ValueError(f"Answer {number} has the histogram {list(histogram)}: counts cannot be negative.")
        reached = [
            sum(sum(histogram[depth:]) for histogram in histograms)
            for depth in range(max((len(histogram) for histogram in histograms), default=0))
        ]
        while reached and not reached[-1]:
            reached.pop()
        unconditional = [count / reached[0] for count in reached[1:]]
        return {
            "unconditional": unconditional,
            "conditional": [now / before for before, now in zip(reached, reached[1:], strict=False)],
            "tau_without_bonus": sum(unconditional) if reached else float("nan"),
        }
