# SPDX-License-Identifier: Apache-2.0
"""
How `gto-hf train` loads target, draft and data: every option is used, or refused by name. Level 6.

TRL's `ModelConfig` is about one model. Here two are loaded: what makes a model small or fast is for the frozen target, a revision
is the draft's.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig, ScriptArguments, get_quantization_config

from .gto_config import GTOConfig


@dataclass
class ModelOptions(ModelConfig):
    """
    [`~trl.ModelConfig`] for a draft and its target.

    Args:
        model_name_or_path (`str`, *optional*):
            Draft to train; without it a fresh one is made from the target.
        model_revision (`str`, *optional*, defaults to `"main"`):
            Revision of that draft.
        dtype (`str`, *optional*):
            Of the target. Defaults to what its checkpoint says; with `load_in_4bit` or `load_in_8bit` to `"bfloat16"`.
        attn_implementation (`str`, *optional*):
            Of the target.
        load_in_8bit, load_in_4bit (`bool`, *optional*, defaults to `False`):
            Quantize the target with bitsandbytes as it is loaded.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Draft to train; without it a fresh one is made from the target."}
    )
    model_revision: str = field(default="main", metadata={"help": "Revision of that draft."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the target; default: its checkpoint's, bfloat16 if it is quantized.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention implementation of the target."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Load the target in 8 bits (bitsandbytes)."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Load the target in 4 bits (bitsandbytes)."})


def apply_model_options(options: ModelOptions, script: ScriptArguments, args: GTOConfig) -> None:
    """
    Write into `args` how target (`target_model_init_kwargs`) and draft (`model_init_kwargs`) are loaded.

    Raises:
        ValueError: For an option that would change nothing in this run, and for one that `target_model_init_kwargs` or
            `model_init_kwargs` contradicts.
    """
    _refuse_idle(options, script, args)
    explicit = args.target_model_init_kwargs or {}
    target = _merged("target_model_init_kwargs", explicit, _of_target(options, explicit.get("dtype")))
    args.target_model_init_kwargs = target or None
    revision = {} if options.model_revision == "main" else {"revision": options.model_revision}
    draft = _merged("model_init_kwargs", args.model_init_kwargs, revision)
    args.model_init_kwargs = draft or None


def _of_target(options: ModelOptions, dtype: str | None) -> dict[str, Any]:
    """
    Keyword arguments for `from_pretrained`, all of them JSON; `dtype` is what the explicit ones say. Every process loads a
    quantized target on its own device.
    """
    given = {"dtype": options.dtype, "attn_implementation": options.attn_implementation}
    if options.load_in_4bit or options.load_in_8bit:
        dtype = options.dtype or dtype or "bfloat16"
        if dtype == "auto":
            raise ValueError(
                "`--dtype auto` does not say what a quantized target computes in; name bfloat16, float16 or float32."
            )
        given["dtype"] = dtype
        packed = get_quantization_config(replace(options, dtype=dtype)).to_dict()
        given["quantization_config"] = {name: value for name, value in packed.items() if not name.startswith("_")}
    return {name: value for name, value in given.items() if value is not None}


def _merged(name: str, explicit: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Both; a key that both have must have one value."""
    explicit = explicit or {}
    for key, value in given.items():
        if key in explicit and explicit[key] != value:
            raise ValueError(
                f"The options say {key} = {value!r}, but `--{name}` says {explicit[key]!r}. Leave one of them out."
            )
    return {**explicit, **given}


def _refuse_idle(options: ModelOptions, script: ScriptArguments, args: GTOConfig) -> None:
    """Options that nothing would read."""
    changed = _changed(options) | _changed(script)
    adapter = sorted(name for name in changed if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    packing = sorted(name for name in changed if "bnb" in name)
    fresh = options.model_name_or_path is None
    local = script.dataset_name is not None and Path(script.dataset_name).is_file()
    idle = [
        ("lora_task_type" in changed, "--lora_task_type", "a draft has no task type"),
        (not options.use_peft and adapter, f"--{', --'.join(adapter)}", "no adapter is trained; add `--use_peft`"),
        (not options.load_in_4bit and packing, f"--{', --'.join(packing)}", "the target is not loaded in 4 bits; add `--load_in_4bit`"),
        (fresh and "model_revision" in changed, "--model_revision", "it is that of a draft; name one with `--model_name_or_path`"),
        (fresh and args.model_init_kwargs, "--model_init_kwargs", "they load a draft; name one with `--model_name_or_path`"),
        (script.ignore_bias_buffers, "--ignore_bias_buffers", "a draft has no such buffers"),
        (local and script.dataset_config, "--dataset_config", f"`{script.dataset_name}` is a file, which has no configurations"),
        (
            script.dataset_streaming and args.max_steps <= 0,
            "--dataset_streaming",
            "the length of a stream is not known; say with `--max_steps` when to stop",
        ),
    ]  # fmt: skip
    for unused, name, reason in idle:
        if unused:
            raise ValueError(f"`{name}` cannot be used: {reason}.")


def _changed(options: Any) -> set[str]:
    """Fields that differ from their defaults."""
    return {f.name for f in fields(options) if f.default is not MISSING and getattr(options, f.name) != f.default}
