# SPDX-License-Identifier: Apache-2.0
"""
Acceptance length τ of speculative decoding, for `evaluate.load`. Level 0: a script of its own.

It is copied elsewhere when it is loaded, also where gto-hf is not installed, so it imports nothing of it.
"""

import datasets
import evaluate


_DESCRIPTION = """
Acceptance length τ: tokens emitted per forward of the target after the prefill, the bonus token counted. The token of the
prefill belongs to no round; a last round that EOS or a length limit cuts is a round, with what it emitted.
"""

_KWARGS_DESCRIPTION = """
Args:
    histograms (`list[list[int]]`): One histogram per answer: entry `i` counts the rounds that emitted `i` drafted tokens
        (`output.statistics.accepted_histogram` of gto-hf). An answer that ended within the prefill has `[]`.
    bonus_tokens (`list[int]`): Per answer, rounds that ended with a token of the target's own.

Returns:
    `dict[str, float]`: `tau_micro` (total by total), `tau_macro` (mean of the answers' own, those without a round left
    out), `tau_without_bonus` (drafted tokens per round), `rounds` and `answers`. NaN without a round.

Examples:
    >>> tau = evaluate.load("gto_hf/metrics/acceptance_length")
    >>> tau.compute(histograms=[[1, 0, 1, 1], [0, 1]], bonus_tokens=[2, 1])["tau_micro"]
    2.25
"""

_CITATION = """
@article{hu2025bridging,
  title={Bridging Draft Policy Misalignment: Group Tree Optimization for Speculative Decoding},
  author={Hu, Shijing and Li, Jingyang and Lu, Zhihui and Zhou, Pan},
  journal={arXiv preprint arXiv:2509.22134},
  year={2025}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceLength(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"histograms": datasets.Sequence(datasets.Value("int64")), "bonus_tokens": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(self, histograms: list, bonus_tokens: list) -> dict:
        rounds, accepted, taus = 0, 0, []
        for number, (histogram, bonus) in enumerate(zip(histograms, bonus_tokens, strict=True)):
            own = sum(histogram)
            if min(histogram, default=0) < 0 or not 0 <= bonus <= own:
                raise ValueError(
                    f"Answer {number} has the histogram {list(histogram)} and {bonus} bonus tokens: counts cannot be negative, "
                    f"and its {own} rounds have at most one bonus token each. Give rounds by drafted tokens emitted."
                )
            drafted = sum(length * count for length, count in enumerate(histogram))
            rounds, accepted = rounds + own, accepted + drafted
            if own:
                taus.append((drafted + bonus) / own)
        nan = float("nan")
        return {
            "tau_micro": (accepted + sum(bonus_tokens)) / rounds if rounds else nan,
            "tau_macro": sum(taus) / len(taus) if taus else nan,
            "tau_without_bonus": accepted / rounds if rounds else nan,
            "rounds": rounds,
            "answers": len(histograms),
        }
