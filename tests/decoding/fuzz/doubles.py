# SPDX-License-Identifier: Apache-2.0
"""What users pass to `generate`: processors, criteria, streamers, and functions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from tests.families import VOCAB


class Bias(LogitsProcessor):
    """Stateless: shifts the scores by a function of each row's length and last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids[:, -1:] if input_ids.shape[1] else torch.zeros(len(input_ids), 1, dtype=torch.long)
        vocabulary = torch.arange(scores.shape[1])
        return scores + 2 * ((vocabulary * 7 + last * 5 + input_ids.shape[1]) % 11 == 0)


class Counting(LogitsProcessor):
    """Stateful: bans a token that depends on how often it was called, and remembers the prefixes."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.arange(3, VOCAB, 1 + len(self.seen) % 5), -torch.inf)


class StopAfter(StoppingCriteria):
    """Stops a row at a token that a number divides, in the second half of the text; remembers the lengths it saw."""

    def __init__(self, divisor: int, start: int) -> None:
        self.divisor, self.start, self.lengths = divisor, start, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -1] % self.divisor == 0) & (input_ids.shape[1] > self.start)


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.ids.extend(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def allowed_tokens(every: int) -> Any:
    """A `prefix_allowed_tokens_fn` that depends on the prompt's number and on the prefix."""

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        last = int(ids[-1]) if len(ids) else 0
        return [token for token in range(2, VOCAB) if (token + prompt + last) % every]

    return allowed


def watermark(kind: str) -> Any:
    if kind == "synthid":
        return SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, context_history_size=16)
    return WatermarkingConfig(bias=4.0, seeding_scheme="selfhash" if kind == "selfhash" else "lefthash")
