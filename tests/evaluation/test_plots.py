# SPDX-License-Identifier: Apache-2.0
"""What the pictures of an evaluation show and leave out."""

from gto_hf.decoding import DecodingStatistics
from gto_hf.evaluation import plots
from gto_hf.evaluation.counts import Counts
from gto_hf.evaluation.report import Result


def result(histogram):
    counts = Counts(statistics=DecodingStatistics(rounds=sum(histogram), accepted_histogram=histogram))
    return Result("draft", 0.0, "all", counts, Counts(), 0, 0.0)


def test_conditional_acceptance_is_drawn_only_where_enough_rounds_got_that_far():
    # 100 rounds; 60, 20, 19 and 3 of them reached depths 1 to 4.
    figure = plots._by_depth([result([40, 40, 1, 16, 3])])
    whole, step = figure.axes[0].lines
    assert list(whole.get_xdata()) == [1, 2, 3, 4] and list(whole.get_ydata()) == [0.6, 0.2, 0.19, 0.03]
    assert list(step.get_xdata()) == [1, 2, 3] and list(step.get_ydata()) == [0.6, 20 / 60, 19 / 20]
    assert "at least 20" in figure.axes[-1].get_xlabel()


def test_a_short_run_keeps_what_all_its_rounds_say():
    whole, step = plots._by_depth([result([4, 6])]).axes[0].lines
    assert list(whole.get_ydata()) == [0.6] and len(step.get_xdata()) == 0
