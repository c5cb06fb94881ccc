# SPDX-License-Identifier: Apache-2.0
"""One forward of the frozen target over a batch: features, what its logits follow from, and its cache. Level 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from gto_hf.target import LogitHead, boundary_features, has_windows, target_head, text_config

from .sequences import Sequences


# Logits of the target's whole vocabulary in float32 that exist at a time: 32 M numbers are 128 MB.
WIDE_ELEMENTS = 2**25


@dataclass(frozen=True)
class Readout:
    """
    The target's logits at slots of a batch, made where they are asked for: no `(B, T, V)` tensor.

    Attributes:
        states (`torch.FloatTensor`): Last hidden states `(B, S, H)`, or, for a target whose head is not understood, its
            logits `(B, S, V)`.
        head ([`LogitHead`], *optional*): Turns the former into logits; None for the latter.
        vocab_size (`int`): V.
        first (`int`): Slot of column 0.
        top (`torch.LongTensor` of shape `(B, S)`, *optional*): Most likely token, where it is known already.
        normaliser (`torch.FloatTensor` of shape `(B, S)`, *optional*): `logsumexp` of the logits, where known already.
    """

    states: torch.Tensor
    head: LogitHead | None
    vocab_size: int
    first: int
    top: torch.Tensor | None = None
    normaliser: torch.Tensor | None = None

    @property
    def last(self) -> int:
        """Slot after the last one."""
        return self.first + self.states.shape[1]

    def logits(self, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Logits `(n, V)` in the target's dtype after slots `(n,)` of rows `(n,)`; all within `first .. last - 1`."""
        states = self.states[row, slot - self.first]
        return states if self.head is None else self._unmixed(self.head, states)

    def kept(
        self, row: torch.Tensor, slot: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        What a draft of vocabulary `ids` `(Vd,)` is taught after slots `(n,)` of rows `(n,)`.

        Returns:
            Logits of `ids` `(n, Vd)` in the target's dtype, the normaliser `(n,)` of the whole vocabulary in float32,
            and the most likely token `(n,)` of the whole vocabulary.
        """
        if self.top is not None and self.normaliser is not None and self.head is not None:
            column = slot - self.first
            some = self._unmixed(self.head.rows, self.states[row, column], ids)
            return some, self.normaliser[row, column], self.top[row, column]
        whole = len(ids) == self.vocab_size and torch.equal(ids, torch.arange(len(ids), device=ids.device))
        parts = []
        rows = max(1, WIDE_ELEMENTS // self.vocab_size)
        for at in range(0, max(1, len(row)), rows):
            some = slice(at, at + rows)
            logits = self.logits(row[some], slot[some])
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            mine = logits if whole else logits.index_select(-1, ids)
            parts.append((mine, wide.logsumexp(-1), logits.max(-1).indices))  # on CPUs faster than argmax
        found, normaliser, top = (torch.cat(each) for each in zip(*parts, strict=True))
        return found, normaliser, top

    def _unmixed(self, call: Any, *args: torch.Tensor) -> torch.Tensor:
        """In the target's own dtype, as in its forward: mixed precision is the draft's."""
        with torch.no_grad(), torch.autocast(self.states.device.type, enabled=False):
            return call(*args)


@dataclass(frozen=True)
class TargetReading:
    """
    What the target says about a batch.

    Attributes:
        sequences ([`Sequences`]): Tokens and features.
        readout ([`Readout`]): Its logits, from the first slot asked for.
        cache (`Cache`, *optional*): Keys and values of the sequences, if asked for.
    """

    sequences: Sequences
    readout: Readout
    cache: Any


@torch.no_grad()
def read_target(
    target: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    feature_layers: list[int],
    first: int,
    last: int,
    *,
    use_cache: bool,
    whole: bool = False,
) -> TargetReading:
    """
    Forward a batch, padded on either side, through the target.

    Args:
        target (`PreTrainedModel`): Frozen causal LM.
        input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): Batch.
        feature_layers (`list[int]`): Indices into `hidden_states`; may be empty.
        first, last (`int`): Slots `first .. last - 1` whose logits may be asked for.
        use_cache (`bool`): Keep keys and values, to hang trees on.
        whole (`bool`, *optional*, defaults to `False`): Make all logits in this one forward.
    """
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "use_cache": use_cache,
    }
    final = text_config(target).num_hidden_layers  # its boundary is the last hidden state, after the norm
    narrow = target._supports_logits_to_keep()
    head = target_head(target, input_ids[:1, :8]) if narrow and not whole else None
    wanted = [*feature_layers, final] if head is not None else list(feature_layers)
    if wanted:
        inputs["output_hidden_states"] = wanted
    if use_cache and has_windows(target):
        inputs["cache"] = DynamicCache()  # without a config: layers with a window must not evict what trees will see
    if narrow:
        # By indices even for a single one: a slice of a batch is not contiguous, and PyTorch would copy the head per row.
        kept = range(1) if head is not None else range(first, last)
        inputs["logits_to_keep"] = torch.tensor(kept, device=input_ids.device)
    output = target(**inputs)
    features = output.logits.new_zeros(*input_ids.shape, 0)  # for drafts that read none
    if feature_layers:
        features = boundary_features(output.hidden_states, list(feature_layers)).to(input_ids.device)
    if head is not None:
        states = boundary_features(output.hidden_states, [final])[:, first:last]
    else:
        states = output.logits if narrow else output.logits[:, first:last]
    return TargetReading(
        sequences=Sequences(input_ids, features, attention_mask.bool(), position_ids),
        readout=Readout(states, head, output.logits.shape[-1], first),
        cache=output.cache if use_cache else None,
    )
