# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 in SafeAILab's layout, and heads of others that say no more than it does. Level 3.

A plain Llama config with `draft_vocab_size` (or `truncated_vocab_size`). Nothing says which layers are read: it is always
EAGLE-3's rule. SafeAILab's training computes rotary angles from base 10,000 whatever `rope_theta` says.
"""

from __future__ import annotations

from typing import Any

import torch

from gto_hf.drafts import DraftConfig

from .eagle3_file import Eagle3File, is_eagle3


DIALECT = "SafeAILab"
# Kinds of rotary scaling that its training code has.
_TRAINED = (None, "default", "linear", "dynamic")


def matches(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these are an EAGLE-3 draft's tensors; asked last, when no other project's mark was found."""
    return is_eagle3(tensors)


def read(
    source: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    *,
    feature_layers: list[int] | None,
    target_layers: int | None,
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """
    Complete config and tensors of a draft.

    Args:
        source (`str`): For messages.
        config (`dict`): Their `config.json`.
        tensors (`dict[str, torch.Tensor]`): Their tensors.
        feature_layers (`list[int]`, *optional*): `hidden_states` indices, if the caller knows them.
        target_layers (`int`, *optional*): Layers of the target.

    Raises:
        DraftCheckpointError: Names missing tensors, contradicting sizes, or the missing argument.
    """
    file = Eagle3File(DIALECT, source, config, tensors, config.get("_said"))
    layers = file.feature_layers(None, 0, feature_layers, target_layers)
    # The mark of our own exports, and heads that only share these names: their configs say what they were trained with.
    stated = config.get("written_by") == "gto-hf" or config.get("truncated_vocab_size") is not None
    return file.finish(
        layers=layers,
        rope=file.rope() if stated else trained_rope(file),
        trained_length=config.get("trained_length", config.get("max_position_embeddings")),
    )


def trained_rope(file: Eagle3File) -> dict[str, Any]:
    """
    The rotary parameters that SafeAILab's training code, and what was made from it, really used.

    Scaling is honoured there, `rope_theta` is not. A kind of scaling that the code does not know means that the head was
    trained elsewhere: then all is as the config says.
    """
    rope = file.rope()
    if rope["rope_type"] not in _TRAINED or rope["rope_theta"] == 10000.0:
        return rope
    file.note(
        f"`rope_theta={rope['rope_theta']:g}` is ignored: {file.dialect}'s training uses base 10,000 whatever the config says "
        "(pass `rope_parameters=` if this head was trained elsewhere)",
        doubtful="rope_parameters" not in file.said,
    )
    return {**rope, "rope_theta": 10000.0}
