# SPDX-License-Identifier: Apache-2.0
"""What a call with a draft and stock's must have in common."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    StopStringCriteria,
)

from .calls import Call, Case
from .doubles import StopAfter


def row_ends(case: Case, call: Call, kwargs: dict[str, Any], start: int) -> list[int]:
    """New tokens of each row, up to and with the one that stopped it."""
    new = call.sequences[:, start:]
    eos = case.stops.get("eos_token_id")
    if eos is None:
        return [new.shape[1]] * len(new)
    stop = torch.isin(new, torch.tensor(eos))
    criteria: list[Any] = []
    if "stopping_criteria" in case.case:
        used = kwargs["stopping_criteria"][0]
        criteria.append(StopAfter(used.divisor, used.start))
    if "tokenizer" in kwargs:
        criteria.append(StopStringCriteria(stop_strings=case.stops["stop_strings"], tokenizer=kwargs["tokenizer"]))
    for step in range(new.shape[1]):
        for criterion in criteria:
            stop[:, step] |= criterion(call.sequences[:, : start + step + 1], None)
    return [int(row.nonzero()[0]) + 1 if row.any() else new.shape[1] for row in stop]


def _close(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Forwards of different width round differently, and the large random weights amplify it; texts are compared exactly."""
    assert mine.shape == theirs.shape, (name, mine.shape, theirs.shape)
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3, msg=lambda text: f"{name}: {text}")


def _asked_for(case: Case, name: str, stock: Call, tree: Call) -> list[tuple]:
    """A record of every step, the draft's call's and stock's; none if it was not asked for."""
    theirs, mine = getattr(stock.output, name), getattr(tree.output, name)
    if f"output_{name}" not in case.case:
        assert mine is None
        return []
    assert len(mine) == len(theirs), name
    return list(zip(mine, theirs, strict=True))


def _compare_records(case: Case, stock: Call, tree: Call, ends: list[int]) -> None:
    """Scores, logits, states, attentions of every row's own tokens."""
    asked = case.case
    for name in ("scores", "logits"):
        for step, (a, b) in enumerate(_asked_for(case, name, stock, tree)):
            live = [row for row, end in enumerate(ends) if step < end]
            if name == "scores" and asked.get("watermarking_config") == "synthid":
                a, b = a.softmax(-1), b.softmax(-1)  # logarithms of differences: small ones are mostly rounding
            _close(f"{name}[{step}]", a[live], b[live])
    for name in ("hidden_states", "attentions"):
        for step, (a, b) in enumerate(_asked_for(case, name, stock, tree)):
            assert len(a) == len(b), name
            live = [row for row, end in enumerate(ends) if step < end]
            for layer, (x, y) in enumerate(zip(a, b, strict=True)):
                if y is None:
                    assert x is None
                    continue
                if case.static and x.shape[-2] == case.mask.shape[1] > 1:  # padding looks at all columns alike
                    read = case.mask.repeat_interleave(case.rows // len(case.mask), 0)
                    read = read[:, :, None] if x.ndim == 3 else read[:, None, :, None]
                    x, y = x * read, y * read
                if name == "attentions":
                    x, y = _same_columns(x, y, case.static)
                assert x.shape == y.shape, (name, step, layer, x.shape, y.shape)
                _close(f"{name}[{step}][{layer}]", x[live], y[live])


def _same_columns(mine: torch.Tensor, theirs: torch.Tensor, static: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attentions to the columns that both have; there is nothing in the others.

    Static caches have room behind the text, as much as they were made for. Caches that keep everything, which batches
    need, have columns before the window.
    """
    columns = min(mine.shape[-1], theirs.shape[-1])
    some = slice(None, columns) if static else slice(-columns, None)
    for attention in (mine, theirs):
        if attention.shape[-1] > columns:
            assert not (attention[..., columns:] if static else attention[..., :-columns]).any()
    return mine[..., some], theirs[..., some]


def compare(case: Case, stock: Call, tree: Call, kwargs: dict[str, Any], start: int) -> None:
    """All that must be equal, and for sampled batches all that must hold."""
    asked = case.case
    same = case.rows == 1 or "do_sample" not in asked or asked.get("top_k") == 1
    assert type(tree.sequences) is torch.Tensor and tree.sequences.dtype == stock.sequences.dtype
    ends = row_ends(case, tree, kwargs, start)
    if same:
        assert tree.sequences.tolist() == stock.sequences.tolist()
        if "streamer" in asked:
            mine, theirs = tree.objects["streamer"], stock.objects["streamer"]
            assert mine.ids == theirs.ids and mine.ends == theirs.ends == 1
        caches = [call.objects["cache"] or getattr(call.output, "cache", None) for call in (stock, tree)]
        if None not in caches:
            assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()), "cache length"
        if "return_dict_in_generate" in asked:
            _compare_records(case, stock, tree, ends)
    else:
        _check_sampled_batch(case, stock, tree, ends, start)
    if case.rows == 1:
        assert torch.equal(stock.random, tree.random), "the generator was drawn from more or less often"
        if asked.get("logits_processor") == "stateful":
            assert tree.objects["logits_processor"][0].seen == stock.objects["logits_processor"][0].seen
        if "stopping_criteria" in asked:
            assert tree.objects["stopping_criteria"][0].lengths == stock.objects["stopping_criteria"][0].lengths
    if "return_dict_in_generate" in asked:
        _check_statistics(case, tree, ends, start)


def _check_sampled_batch(case: Case, stock: Call, tree: Call, ends: list[int], start: int) -> None:
    """A batch draws its rows' random numbers in another order, so only the form of the text is known."""
    mine, theirs = tree.sequences, stock.sequences
    assert len(mine) == len(theirs) and start < mine.shape[1] <= start + case.case["max_new_tokens"]
    assert torch.equal(mine[:, :start], theirs[:, :start])
    new = mine[:, start:]
    assert max(ends) == new.shape[1]
    pad = case.pad_token_id()
    for row, end in zip(new, ends, strict=True):
        assert (row[end:] == pad).all()
    if "suppress_tokens" in case.case:
        for row, end in zip(new, ends, strict=True):
            assert not torch.isin(row[:end], torch.tensor(case.case["suppress_tokens"])).any()
    if "output_scores" in case.case:
        for step, scores in enumerate(tree.output.scores):
            for row, end in enumerate(ends):
                assert step >= end or scores[row, new[row, step]] > -torch.inf
    if "streamer" in case.case:
        streamer = tree.objects["streamer"]
        assert streamer.ids[-new.numel() :] == new.T.flatten().tolist() and streamer.ends == 1


def _check_statistics(case: Case, tree: Call, ends: list[int], start: int) -> None:
    """Counts add up, and the forwards that were counted are the forwards that ran."""
    counts = tree.output.statistics
    new = tree.sequences.shape[1] - start
    stopped = not {"stopping_criteria", "stop_strings"}.isdisjoint(case.case)
    open_end = case.rows > 1 and stopped and "eos_token_id" not in case.stops
    # Without an end token, a row that a criterion stopped goes on, maybe past where another one stops the batch.
    assert counts.emitted_tokens == sum(ends) or open_end and counts.emitted_tokens > sum(ends), (counts, ends)
    assert counts.emitted_tokens == counts.runs + counts.accepted_tokens + counts.bonus_tokens
    assert counts.runs == case.rows and counts.rounds == sum(counts.accepted_histogram)
    forwards = counts.target_forwards
    if "prefill_chunk_size" in case.case:  # one prefill, but one forward per chunk
        forwards += case.chunks - 1
    if "guidance_scale" in case.case:  # forwards of its own, one per token
        forwards += new
    assert tree.forwards == forwards, (tree.forwards, counts)
