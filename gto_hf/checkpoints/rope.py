# SPDX-License-Identifier: Apache-2.0
"""Rotary parameters as other projects' configs write them, in one form. Level 3."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gto_hf.drafts import DraftCheckpointError


def read_rope(source: str, config: dict[str, Any], where: str = "`config.json`") -> tuple[dict[str, Any], list[str]]:
    """
    What a config says about rotary embeddings, and what had to be decided to read it.

    `rope_parameters` (transformers 5) comes first, then `rope_scaling`, `rope_theta` and `partial_rotary_factor`. What is
    not said is the default rotary embedding with base 10,000: never the target's.

    Args:
        where (`str`): For messages.

    Raises:
        DraftCheckpointError: If it names a kind of rotary embedding that transformers does not have.
    """
    notes = []
    new = config.get("rope_parameters")
    stated = new or config.get("rope_scaling") or {}
    if not isinstance(stated, dict):
        raise DraftCheckpointError(
            f"{where} of `{source}` has rotary parameters {stated!r}; a set of fields is needed."
        )
    rope = dict(stated)
    if any(isinstance(value, dict) for value in rope.values()):
        raise DraftCheckpointError(
            f"{where} of `{source}` has rotary parameters per kind of layer ({', '.join(sorted(rope))}), and nothing "
            "says which the draft has. Pass its own as `rope_parameters=`."
        )
    kind = rope.pop("type", None) or "default"
    kind = rope.setdefault("rope_type", kind)
    if kind == "mrope" or "mrope_section" in rope:
        notes.append("multimodal rotary sections are left out: on text all of them count alike")
        rope = {k: v for k, v in rope.items() if not k.startswith("mrope")}
        rope["rope_type"] = kind = "default" if kind == "mrope" else kind
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise DraftCheckpointError(
            f"{where} of `{source}` says `rope_type={kind!r}`. Known are default, {', '.join(ROPE_INIT_FUNCTIONS)}. "
            "Pass what the draft was trained with as `rope_parameters=`."
        )
    for field in ("rope_theta", "partial_rotary_factor"):
        if rope.get(field) is None and config.get(field) is not None:
            rope[field] = config[field]
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = 10000.0
        notes.append("no `rope_theta` is stated: base 10,000")
    rope["rope_theta"] = float(rope["rope_theta"])
    if rope.get("partial_rotary_factor", 1.0) in (None, 1.0):
        rope.pop("partial_rotary_factor", None)
    return rope, notes
