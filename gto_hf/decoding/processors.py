# SPDX-License-Identifier: Apache-2.0
"""
Logits processors of a batch, one row at a time. Level 4.

Rows of a batch accept different numbers of tokens, so they are never at the same step and cannot be processed together.
A processor that tells rows apart by their number gets a view of its own row.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def check_processors(processors: LogitsProcessorList, rows: int) -> None:
    """
    Refuse processors that cannot follow one row of a batch, before any forward.

    Raises:
        ValueError: For guidance with more than one row: it runs the target on the whole batch itself.
    """
    guidance = (UnbatchedClassifierFreeGuidanceLogitsProcessor, ClassifierFreeGuidanceLogitsProcessor)
    if rows > 1 and any(isinstance(p, guidance) for p in processors):
        raise ValueError(
            f"`guidance_scale` runs the target on the whole batch at every token, but with a draft the {rows} rows "
            "advance at their own speed. Call `generate` once per row, or omit `assistant_model`."
        )


def row_processors(processors: LogitsProcessorList, rows: int) -> list[LogitsProcessorList]:
    """One list per row. A processor of unknown class is shared and called with one row at a time."""
    if rows == 1:
        return [processors]
    return [LogitsProcessorList(_of_row(p, row, rows) for p in processors) for row in range(rows)]


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """What stands for `processor` when it only sees row `row` of `rows`."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, sentence: allowed(prompt, sentence), 1)
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # keeps the recent context of every row
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        view = copy.copy(processor)
        ids = processor.encoder_input_ids
        which = row * len(ids) // rows
        view.encoder_input_ids = ids[which : which + 1]
        return view
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        view = copy.copy(processor)
        view.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // rows]]
        view.batch_size = 1
        return view
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if getattr(ignored, "ndim", 0) > 0 and ignored.shape[0] == rows:
            view = copy.copy(processor)
            view.prompt_ignore_length = ignored[row : row + 1]
            return view
    return processor
