# SPDX-License-Identifier: Apache-2.0
"""One forward of the frozen target over a batch: features, the logits that are needed, and its cache. Level 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from gto_hf.target import boundary_features, has_windows

from .sequences import Sequences


@dataclass(frozen=True)
class TargetReading:
    """
    What the target says about a batch.

    Attributes:
        sequences ([`Sequences`]): Tokens and features.
        logits (`torch.FloatTensor` of shape `(B, last - first, V)`): In the target's dtype, at slots `first ..`.
        first (`int`): Slot of the first logits.
        cache (`Cache`, *optional*): Keys and values of the sequences, if asked for.
    """

    sequences: Sequences
    logits: torch.Tensor
    first: int
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
) -> TargetReading:
    """
    Forward a batch, padded on either side, through the target.

    Args:
        target (`PreTrainedModel`): Frozen causal LM.
        input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): Batch.
        feature_layers (`list[int]`): Indices into `hidden_states`; may be empty.
        first, last (`int`): Slots `first .. last - 1` whose logits are wanted; no others are computed.
        use_cache (`bool`): Keep keys and values, to hang trees on.
    """
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "use_cache": use_cache,
    }
    if feature_layers:
        inputs["output_hidden_states"] = list(feature_layers)
    if use_cache and has_windows(target):
        inputs["cache"] = DynamicCache()  # without a config: layers with a window must not evict what trees will see
    narrow = target._supports_logits_to_keep()
    if narrow:
        inputs["logits_to_keep"] = torch.arange(first, last, device=input_ids.device)
    output = target(**inputs)
    features = output.logits.new_zeros(*input_ids.shape, 0)  # for drafts that read none
    if feature_layers:
        features = boundary_features(output.hidden_states, list(feature_layers)).to(input_ids.device)
    return TargetReading(
        sequences=Sequences(input_ids, features, attention_mask.bool(), position_ids),
        logits=output.logits if narrow else output.logits[:, first:last],
        first=first,
        cache=output.cache if use_cache else None,
    )
