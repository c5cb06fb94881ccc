# SPDX-License-Identifier: Apache-2.0
"""What an export needs to know of the target: name, depth, positions, embedding. Level 4."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gto_hf.checkpoints import AutoDraft
from gto_hf.drafts import DraftConfig, DraftModel
from gto_hf.target import config_fingerprint, is_hub_id, unwrap


@dataclass
class Pair:
    """
    A draft's config completed with what its target says.

    Attributes:
        config ([`DraftConfig`]): A copy whose `target` is filled. name (`str`, *optional*): The target's Hub id.
        shown (`str`): What stands for the target in a command. max_positions (`int`): Of draft and target, the larger.
        architectures (`list[str]`): The target's.
    """

    config: DraftConfig
    name: str | None
    shown: str
    max_positions: int
    architectures: list[str]


def read_draft(
    source: str | PathLike,
    target: nn.Module | None,
    facts: dict[str, Any] | None,
    feature_layers: list[int] | None = None,
    **kwargs: Any,
) -> DraftModel:
    """
    A draft in any layout. What its files do not say of the layers that it reads follows from its target, as with
    [`AutoDraft.from_pretrained`] and a target in memory.

    Args:
        source (`str`): Folder or Hub id. target (`PreTrainedModel`, *optional*): Attached.
        facts (`dict`, *optional*): [`target_facts`] of a target of which only the name is given.
        feature_layers (`list[int]`, *optional*): As of [`AutoDraft.from_pretrained`], which also takes `**kwargs`.
    """
    known = {} if facts is None else {"_target_facts": facts}
    return AutoDraft.from_pretrained(source, target=target, feature_layers=feature_layers, **known, **kwargs)


def target_facts(name: str) -> dict[str, Any]:
    """The fingerprint of a target from its config alone."""
    return config_fingerprint(AutoConfig.from_pretrained(name))


def named_source(target: Any) -> str | None:
    """Where a target is or was loaded from: what must not be replaced."""
    if target is None or isinstance(target, str):
        return target
    return unwrap(target).config._name_or_path


def read_pair(draft: DraftModel, target: nn.Module | str | None, target_name: str | None) -> Pair:
    """
    Args:
        draft ([`DraftModel`]): To export.
        target (`PreTrainedModel` or `str`, *optional*): The target, its Hub id or its folder; of a name only the config is read.
        target_name (`str`, *optional*): Hub id to write, where `target` is a folder or a model without a name.

    Raises:
        ValueError: If draft and target do not fit, with both numbers.
    """
    if target_name is not None and not is_hub_id(target_name):
        raise ValueError(
            f"`target_name={target_name!r}` must be a Hub id (`owner/name`): it is written for other people."
        )
    config = copy.deepcopy(draft.config)
    stored = dict(config.target or {})
    source = None
    if isinstance(target, str):
        source = AutoConfig.from_pretrained(target)
    elif target is not None:
        source = unwrap(target).config
    if source is None:
        name = target_name or stored.get("name_or_path")
        name = name if is_hub_id(name) else None
        return Pair(config, name, name or "path/to/target", config.max_position_embeddings, [])
    text = source.get_text_config()
    for field, own, found in (
        ("vocab_size", config.vocab_size, text.vocab_size),
        ("hidden_size", config.target_hidden_size, text.hidden_size),
        ("num_hidden_layers", stored.get("num_hidden_layers"), text.num_hidden_layers),
    ):
        if own is not None and own != found:
            raise ValueError(
                f"This draft was made for a target with `{field}={own}`, but the given one has {found}. Export with the "
                "target that it was trained for."
            )
    path = source._name_or_path
    # A folder such as `runs/llm` looks like a Hub id, and the fingerprint tells them apart.
    named = target_name or config_fingerprint(source)["name_or_path"] or stored.get("name_or_path")
    named = named if is_hub_id(named) else None
    architectures = source.architectures or ([type(unwrap(target)).__name__] if isinstance(target, nn.Module) else [])
    config.target = {**stored, "num_hidden_layers": text.num_hidden_layers}
    positions = config.max_position_embeddings
    if config.rope_parameters.get("rope_type") != "dynamic":  # its angles depend on this number
        positions = max(positions, getattr(text, "max_position_embeddings", None) or 0)
    return Pair(config, named, target_name or path or "path/to/target", positions, list(architectures))


def target_embedding(draft: DraftModel, target: Any) -> torch.Tensor:
    """
    The target's embedding as stored, `(V, H)`: from the model at hand, or from the named one, which is then loaded.

    Raises:
        ValueError: If there is neither.
    """
    module = draft.borrowed_embedding()
    if module is None and isinstance(target, str):
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    if module is None and target is not None:
        module = unwrap(target).get_input_embeddings()
    if module is None:
        raise ValueError(
            "The engine wants the token embedding stored with the draft, and this draft borrows its target's. Pass the "
            "target (`target=`, `--target`)."
        )
    return module.weight
