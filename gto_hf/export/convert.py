# SPDX-License-Identifier: Apache-2.0
"""[`convert`]: a draft of any layout into gto-hf's own. Level 4."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gto_hf.drafts import DraftModel

from .dialects import FLAGS
from .folder import check_free, whole_folder
from .pair import named_source, read_draft, target_facts


def convert(
    source: str | PathLike,
    folder: str | PathLike,
    *,
    target: nn.Module | str | None = None,
    feature_layers: list[int] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    **kwargs: Any,
) -> tuple[DraftModel, str]:
    """
    Read a draft of any layout that [`AutoDraft`] knows and save it in gto-hf's own, complete and strict.

    Args:
        source (`str`): Folder or Hub id. folder (`str`): Where to write.
        target (`PreTrainedModel` or `str`, *optional*): The target; of a name only the config is read, for EAGLE-3's rule of
            feature layers and the stored facts.
        feature_layers (`list[int]`, *optional*): Indices into the target's `hidden_states`, where the source does not say.
        dtype (`torch.dtype`, *optional*): Of the weights; defaults to the stored one.
        overwrite (`bool`, *optional*, defaults to `False`): Replace what is in `folder`.
        **kwargs: As [`AutoDraft.from_pretrained`] takes (`revision`, `token`, ..).

    Returns:
        The draft, and what was decided, in words.

    Raises:
        DraftCheckpointError: If the source is no complete draft. ValueError: If the folder is taken.
    """
    folder = Path(folder)
    check_free(folder, overwrite=overwrite, sources=(source, named_source(target)))
    facts = None
    if isinstance(target, str):
        facts, target = target_facts(target), None
    draft = read_draft(source, target, facts, feature_layers, dtype=dtype, **kwargs)
    config = draft.config
    if facts is not None:
        _check(config, facts)
        config.target = facts if config.target is None else {**facts, **config.target}
    with whole_folder(folder) as inside:
        draft.save_pretrained(inside)
    return draft, _decisions(draft, str(source))


def _check(config: Any, facts: dict[str, Any]) -> None:
    depth = (config.target or {}).get("num_hidden_layers")
    for field, own in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.target_hidden_size),
        ("num_hidden_layers", depth),
    ):
        if own is not None and own != facts[field]:
            raise ValueError(
                f"This draft was made for a target with `{field}={own}`, but the given target has {facts[field]}."
            )
    if config.feature_layers and config.feature_layers[-1] > facts["num_hidden_layers"]:
        raise ValueError(
            f"This draft reads `feature_layers={list(config.feature_layers)}`, but the given target has "
            f"{facts['num_hidden_layers']} layers."
        )


def _decisions(draft: DraftModel, source: str) -> str:
    """What the file said and what had to be decided."""
    config = draft.config
    rope = config.rope_parameters or {}
    lines = {
        "draft type": config.draft_type,
        "layers": config.num_hidden_layers,
        "feature layers (hidden_states indices)": list(config.feature_layers),
        "vocabulary": f"{config.draft_vocab_size} of {config.vocab_size}",
        "width": f"{config.hidden_size}, target {config.target_hidden_size}, heads {config.num_attention_heads}"
        f"/{config.num_key_value_heads} of {config.head_dim}",
        "embedding": "its own" if config.own_embeddings else "the target's",
        "rotary": f"{rope.get('rope_type', 'default')}, base {rope.get('rope_theta')}",
        "longest training row": config.trained_length,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "target": (config.target or {}).get("name_or_path") or "unknown",
    }
    flags = [name for name in FLAGS if getattr(config, name, None)]
    if flags:
        lines["flags"] = ", ".join(flags)
    found = getattr(config, "source", None) or {}
    if found.get("dialect"):
        lines = {"layout": found["dialect"], **lines}
    decided = [f"  decided: {text}" for text in found.get("decisions", [])]
    return "\n".join([f"read {source}", *(f"  {name}: {value}" for name, value in lines.items()), *decided])
