# SPDX-License-Identifier: Apache-2.0
"""
The target's features of training rows, kept on disk so that later epochs need no target. Level 4.

Only the token loss can do without the target: trees hang on its keys and values, which are many times larger.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.target import LogitHead, text_config

from .reading import Readout, TargetReading
from .sequences import Sequences
from .store import RowStore, row_key


# Positions whose full logits are made at a time when a row is written.
_POSITIONS = 256


class FeatureStore:
    """
    What the token loss reads of the target, by row: features, last hidden states, most likely token and normaliser.

    Args:
        store ([`RowStore`]): Where rows are kept. Its facts must name the target and the feature layers.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store
        self.head: LogitHead | None = None  # known from the first reading on

    @staticmethod
    def bytes_per_token(layers: list[int], target: Any) -> int:
        """Size on disk of one token of a row: features, last hidden state, most likely token and normaliser."""
        return (len(layers) + 1) * text_config(target).hidden_size * target.dtype.itemsize + 8

    def keep(self, reading: TargetReading, spans: torch.Tensor) -> TargetReading:
        """
        Store the rows of a reading; returns it with what was computed for that.

        Args:
            spans (`torch.LongTensor` of shape `(B, 2)`): See [`row_spans`].
        """
        readout, sequences = reading.readout, reading.sequences
        if readout.head is None:
            raise ValueError(
                "Features of this target cannot be stored: how its logits follow from its last hidden state is not known. "
                "Leave `features_path` unset."
            )
        self.head = readout.head
        batch, width = readout.states.shape[:2]
        top = torch.zeros(batch, width, dtype=torch.long, device=readout.states.device)
        normaliser = torch.zeros(batch, width, dtype=torch.float32, device=readout.states.device)
        for b, (start, end) in enumerate(spans.tolist()):
            for some in torch.arange(start, end, device=readout.states.device).split(_POSITIONS):
                logits = readout.logits(torch.full_like(some, b), some)
                top[b, some - readout.first] = logits.max(-1).indices  # on CPUs several times faster than argmax
                normaliser[b, some - readout.first] = logits.float().logsumexp(-1)
            valid = sequences.valid[b]
            own = slice(start - readout.first, end - readout.first)
            self.store.put(
                _key(sequences.input_ids[b], valid, start, end),
                {
                    "features": sequences.features[b][valid],
                    "states": readout.states[b, own],
                    "top": top[b, own].int(),
                    "normaliser": normaliser[b, own],
                },
            )
        known = Readout(readout.states, readout.head, readout.vocab_size, readout.first, top, normaliser)
        return TargetReading(sequences, known, reading.cache)

    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int, last: int, spans: torch.Tensor
    ) -> TargetReading | None:
        """
        A batch as it was stored, with logits at each row's own slots; None if a row is missing or was stored for other ones.

        Args:
            input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): The batch.
            first, last (`int`): Slots from the first to the last that any row needs.
            spans (`torch.LongTensor` of shape `(B, 2)`): See [`row_spans`].
        """
        valid, device = attention_mask.bool(), input_ids.device
        rows = []
        for ids, own, (start, end) in zip(input_ids, valid, spans.tolist(), strict=True):
            row = self.store.get(_key(ids, own, start, end))
            if row is None or self.head is None:
                return None
            rows.append(row)
        batch, length = input_ids.shape
        features = rows[0]["features"].new_zeros(batch, length, rows[0]["features"].shape[-1], device=device)
        states = rows[0]["states"].new_zeros(batch, last - first, rows[0]["states"].shape[-1], device=device)
        top = torch.zeros(batch, last - first, dtype=torch.long, device=device)
        normaliser = torch.zeros(batch, last - first, device=device)
        for b, (row, (start, end)) in enumerate(zip(rows, spans.tolist(), strict=True)):
            features[b, valid[b]] = row["features"].to(device)
            for name, into in (("states", states), ("top", top), ("normaliser", normaliser)):
                into[b, start - first : end - first] = row[name].to(device, into.dtype)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return TargetReading(
            Sequences(input_ids, features, valid, position_ids),
            Readout(states, self.head, self.head.vocab_size, first, top, normaliser),
            None,
        )


def _key(input_ids: torch.Tensor, valid: torch.Tensor, start: int, end: int) -> str:
    """Name of a row `(T,)` with the slots it was read at: rows that are trained on elsewhere are other rows."""
    return f"{row_key(input_ids[valid])}-{int(valid[:start].sum())}-{end - start}"


def row_spans(roots: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """
    `(B, 2)` int64: first root of each row and the slot after its last one; equal where a row has none.

    Args:
        roots, real (`(B, n)`): See [`padded_positions`].
    """
    big = torch.iinfo(torch.long).max
    start, end = roots.masked_fill(~real, big).amin(1), roots.masked_fill(~real, -1).amax(1) + 1
    none = ~real.any(1)
    lowest = roots[real].min() if bool(real.any()) else roots.new_tensor(1)
    return torch.stack([torch.where(none, lowest, start), torch.where(none, lowest, end)], dim=1)
