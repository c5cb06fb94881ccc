# SPDX-License-Identifier: Apache-2.0
"""How answers are to be written: any field of transformers' `GenerationConfig`, checked before a model is loaded (level 4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
# Options of sampling and the value that switches each off; the classes check the others.
CHECKED = {
    "temperature": (TemperatureLogitsWarper, 1.0),
    "top_p": (TopPLogitsWarper, 1.0),
    "top_k": (TopKLogitsWarper, 0),
    "min_p": (MinPLogitsWarper, 0.0),
}
SAMPLERS = {*CHECKED, "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
OURS = {
    "num_return_sequences": "several answers are asked for with `answers`",
    "max_length": "answers are limited by `max_new_tokens`",
    "return_dict_in_generate": "the rows hold the tokens alone",
}


def read_generation(text: str) -> dict[str, Any]:
    """
    Fields of a `GenerationConfig` from a JSON file (such as a model's `generation_config.json`) or from JSON itself.

    Raises:
        ValueError: If it is neither.
    """
    source, inline = text, text.lstrip().startswith("{")
    if not inline:
        if not Path(text).is_file():
            raise ValueError(f"`--generation-config {text}` is neither a file nor a JSON object.")
        source = Path(text).read_text(encoding="utf-8")
    try:
        fields = json.loads(source)
    except json.JSONDecodeError as error:
        raise ValueError(f"`--generation-config {text}` is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"`--generation-config {text}` must hold a JSON object, found {type(fields).__name__}.")
    return {k: v for k, v in fields.items() if k not in ("transformers_version", "_from_model_config")}


def check_generation(fields: dict[str, Any], answers: int) -> dict[str, Any]:
    """
    Fields for `generate`, with sampling switched on if something about it is set.

    Args:
        fields (`dict`): Fields of a `GenerationConfig`; what is not given is the target's own.
        answers (`int`): Per prompt.

    Raises:
        ValueError: Names unknown fields, fields that cannot be set here, and values that transformers refuses.
    """
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"`GenerationConfig` has no field {', '.join(f'`{name}`' for name in unknown)}.")
    for name, reason in OURS.items():
        if fields.get(name) is not None:
            raise ValueError(f"`{name}={fields[name]}` cannot be set: {reason}.")
    fields = {name: value for name, value in fields.items() if value is not None}
    if SAMPLERS & set(fields):
        fields.setdefault("do_sample", True)
    if fields.get("do_sample") is False:
        fields = {name: value for name, value in fields.items() if name not in SAMPLERS}
        if answers > 1:
            raise ValueError(f"`answers={answers}`: without sampling all answers to a prompt are the same. Ask for 1.")
    for name, (warper, off) in CHECKED.items():
        if fields.get(name, off) != off:
            warper(fields[name])
    GenerationConfig(**fields).validate()
    return fields
