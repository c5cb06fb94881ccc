# SPDX-License-Identifier: Apache-2.0
"""
What a config says of a draft, wherever it says it. Level 3.

A field that the project of a checkpoint does not know was written for a reader that does, often by hand for vLLM. To pass over
it would give the right text at no speed, so whatever is stated is either used or an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gto_hf.drafts import DraftCheckpointError


# Under these names layers are listed, some of them counted by their output.
ID_FIELDS = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
    "aux_layer_ids",
)


def parts_of(*configs: dict[str, Any]) -> list[dict[str, Any]]:
    """The places where fields stand: these configs, and `eagle_config` in the first of them."""
    nested = configs[0].get("eagle_config")
    distinct = [config for i, config in enumerate(configs) if all(config is not other for other in configs[:i])]
    return distinct + ([nested] if isinstance(nested, dict) else [])


def flag(source: str, parts: Iterable[dict[str, Any]], name: str) -> bool | None:
    """
    A truth value that stands in any of these places; None if in none.

    Raises:
        DraftCheckpointError: If it is no truth value, or two places differ.
    """
    found = [part[name] for part in parts if part.get(name) is not None]
    if any(value not in (True, False) for value in found):
        raise DraftCheckpointError(f"`config.json` of `{source}` says `{name}={found[0]!r}`; true or false is needed.")
    if len({bool(value) for value in found}) > 1:
        raise DraftCheckpointError(
            f"`config.json` of `{source}` says `{name}` twice, true and false. Repair it: only one can be what was trained."
        )
    return bool(found[0]) if found else None


def check_ids(source: str, parts: Iterable[dict[str, Any]], layers: list[int] | None, dialect: str) -> None:
    """
    Compare every list of layer ids in a config with what was read.

    Args:
        layers (`list[int]`, *optional*): `hidden_states` indices that were read; None if the dialect's own field is missing.

    Raises:
        DraftCheckpointError: If a list stands where the dialect does not look, or says something else in either numbering.
    """
    for part in parts:
        for field in ID_FIELDS:
            ids = part.get(field)
            if not ids or layers is not None and ids in (layers, [i - 1 for i in layers]):
                continue
            if layers is None:
                raise DraftCheckpointError(
                    f"`config.json` of `{source}` lists layers as `{field}={ids!r}`, where {dialect}'s files have none, so it "
                    "cannot be told how they are counted. Pass `feature_layers=` as indices into `hidden_states` (for ids of "
                    "layers whose output is meant, one more than each)."
                )
            raise DraftCheckpointError(
                f"`config.json` of `{source}` lists layers as `{field}={ids!r}`, but by another field they are {layers} as "
                f"`hidden_states` indices. Pass `feature_layers=`."
            )
