# SPDX-License-Identifier: Apache-2.0
"""
Random `generate` arguments, with a draft and without: the same text, scores, states, cache, stream and refusals.

`cases` draws combinations; every case runs stock `generate` first, builds a draft that knows that text (or one that knows
nothing), and runs `generate` again with it. `GTO_HF_FUZZ=2000` runs more cases than the default, `GTO_HF_FUZZ_SEED=1` others.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch

from .fuzz.arguments import ARGUMENTS, cases, drawn, refusal
from .fuzz.calls import Call, Case
from .fuzz.compare import compare, row_ends


COUNT = int(os.environ.get("GTO_HF_FUZZ", "300"))
SEED = int(os.environ.get("GTO_HF_FUZZ_SEED", "0"))
OUTCOMES: dict[int, str] = {}  # of the cases that ran: "compared", "refused" or "stock raises"


def run(drawn_case: dict[str, Any]) -> str:
    """Run a case; returns how it came out."""
    case = Case(drawn_case)
    ids, mask, first = case.ids, case.mask, case.new_cache()
    second = case.new_cache()
    if refusal(drawn_case, None):
        case.choose_stops(ids[0].tolist())
        draft = case.draft([ids[0]])
        return _expect_refusal(case, case.call(case.arguments(ids, mask, second), draft))
    if {"eos_token_id", "stop_strings"} & set(drawn_case):
        probe = case.call(case.arguments(ids, mask, case.new_cache(), stops=False))
        start = 0 if case.embedded == "alone" else ids.shape[1]
        case.choose_stops(ids[0].tolist() if probe.error else probe.sequences[0, start:].tolist())
    stock = case.call(case.arguments(ids, mask, first))
    text = ids if stock.error else stock.sequences
    draft = case.draft([ids[0]] if stock.error else case.texts(ids, mask, text))
    by_stock = drawn_case.get("continue") == "stock"
    tree = case.call(kwargs := case.arguments(ids, mask, second), None if by_stock else draft)
    if stock.error:
        assert tree.error is not None, f"stock raises {stock.error!r}"
        return "stock raises"
    if tree.error:
        raise tree.error
    start = 0 if case.embedded == "alone" else ids.shape[1]
    case.chunks = -(-ids.shape[1] // drawn_case.get("prefill_chunk_size", ids.shape[1]))
    if not by_stock:
        compare(case, stock, tree, kwargs, start)
    if "continue" not in drawn_case or tree.sequences.tolist() != stock.sequences.tolist():
        return "compared"
    # The same arguments again, from the text and the cache of before.
    ends = row_ends(case, stock, kwargs, start)
    each = case.rows // len(mask)
    written = (torch.arange(stock.sequences.shape[1] - start) < torch.tensor(ends)[:, None]).long()
    mask = torch.cat([mask.repeat_interleave(each, 0), written], dim=1)
    ids = stock.sequences
    if each > 1:
        return "compared"  # the prompt of a second call would be repeated again
    reason = refusal(drawn_case, second)
    stock = case.call(case.arguments(ids, mask, first))
    draft = case.draft([ids[0]] if stock.error else case.texts(ids, mask, stock.sequences))
    tree = case.call(kwargs := case.arguments(ids, mask, second), draft)
    if reason:
        return _expect_refusal(case, tree)
    if stock.error:
        assert tree.error is not None, f"stock raises {stock.error!r}"
        return "stock raises"
    if tree.error:
        raise tree.error
    case.chunks = 1  # only the last token is not in the cache yet
    compare(case, stock, tree, kwargs, ids.shape[1])
    return "compared"


def _expect_refusal(case: Case, call: Call) -> str:
    assert isinstance(call.error, ValueError), f"not refused: {call.error!r}"
    assert call.forwards == 0, "refused after a forward"
    return "refused"


ALL = list(cases(COUNT, SEED))


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.filterwarnings("ignore")
def test_a_random_call_equals_stock(number):
    case = ALL[number]
    try:
        OUTCOMES[number] = run(case)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nin {case}") from error


def test_every_argument_was_drawn_and_few_cases_were_refused():
    # Refused cases say nothing about their other arguments.
    reasons = [refusal(case, None) for case in ALL]
    counts = Counter(name for case, reason in zip(ALL, reasons, strict=True) if reason is None for name in drawn(case))
    counts += Counter(reasons)
    rare = {name: counts[name] for name in ARGUMENTS if counts[name] < 10}
    assert COUNT < 300 or not rare
    assert len(ALL) - reasons.count(None) < 0.2 * COUNT
    if len(OUTCOMES) < COUNT:
        pytest.skip("not all cases ran in this process, or some failed")
    outcomes = Counter(OUTCOMES.values())
    assert outcomes["refused"] < 0.2 * COUNT, outcomes
    assert outcomes["stock raises"] < 0.1 * COUNT, outcomes
