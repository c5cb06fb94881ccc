# SPDX-License-Identifier: Apache-2.0
"""
The target's features of training rows, kept on disk so that later epochs need no target. Level 4.

Only the token loss can do without the target: trees hang on its keys and values, which are many times larger.
"""

from __future__ import annotations

import torch

from gto_hf.drafts import DraftModel
from gto_hf.target import LogitHead

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
    def bytes_per_token(draft: DraftModel, dtype: torch.dtype) -> int:
        """Size on disk of one token of a row: features, last hidden state, most likely token and normaliser."""
        width = (len(draft.config.feature_layers) + 1) * draft.config.target_hidden_size
        return width * dtype.itemsize + 8

    def keep(self, reading: TargetReading) -> TargetReading:
        """Store the rows of a reading; returns it with what was computed for that."""
        readout, sequences = reading.readout, reading.sequences
        if readout.head is None:
            raise ValueError(
                "Features of this target cannot be stored: how its logits follow from its last hidden state is not known. "
                "Leave `features_path` unset."
            )
        self.head = readout.head
        batch, width = readout.states.shape[:2]
        top = torch.empty(batch, width, dtype=torch.long, device=readout.states.device)
        normaliser = torch.empty(batch, width, dtype=torch.float32, device=readout.states.device)
        slots = torch.arange(readout.first, readout.last, device=readout.states.device)
        for b in range(batch):
            for some in slots.split(_POSITIONS):
                logits = readout.logits(torch.full_like(some, b), some)
                top[b, some - readout.first] = logits.max(-1).indices  # on CPUs several times faster than argmax
                normaliser[b, some - readout.first] = logits.float().logsumexp(-1)
            valid = sequences.valid[b]
            own = valid[readout.first : readout.last]
            before = int(valid[: readout.first].sum())
            self.store.put(
                row_key(sequences.input_ids[b][valid]),
                {
                    "features": sequences.features[b][valid],
                    "states": readout.states[b][own],
                    "top": top[b][own].int(),
                    "normaliser": normaliser[b][own],
                    "first": torch.tensor([before]),
                },
            )
        known = Readout(readout.states, readout.head, readout.vocab_size, readout.first, top, normaliser)
        return TargetReading(sequences, known, reading.cache)

    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int, last: int
    ) -> TargetReading | None:
        """
        A batch as it was stored, with logits at slots `first .. last - 1`; None if a row is missing or was stored for less.

        Args:
            input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): The batch.
        """
        valid, device = attention_mask.bool(), input_ids.device
        rows = []
        for ids, own in zip(input_ids, valid, strict=True):
            row = self.store.get(row_key(ids[own]))
            before = int(own[:first].sum())
            wanted = int(own[first:last].sum())
            if row is None or self.head is None:
                return None
            offset = before - int(row["first"])
            if offset < 0 or offset + wanted > len(row["states"]):
                return None
            rows.append((row, offset, wanted))
        batch, length = input_ids.shape
        some = rows[0][0]
        features = some["features"].new_zeros(batch, length, some["features"].shape[-1], device=device)
        states = some["states"].new_zeros(batch, last - first, some["states"].shape[-1], device=device)
        top = torch.zeros(batch, last - first, dtype=torch.long, device=device)
        normaliser = torch.zeros(batch, last - first, device=device)
        for b, (row, offset, wanted) in enumerate(rows):
            features[b, valid[b]] = row["features"].to(device)
            here = valid[b, first:last]
            part = slice(offset, offset + wanted)
            for name, into in (("states", states), ("top", top), ("normaliser", normaliser)):
                into[b, here] = row[name][part].to(device, into.dtype)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return TargetReading(
            Sequences(input_ids, features, valid, position_ids),
            Readout(states, self.head, self.head.vocab_size, first, top, normaliser),
            None,
        )
