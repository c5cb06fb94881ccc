# SPDX-License-Identifier: Apache-2.0
"""
The one place that touches another library's class: `generate(assistant_model=<draft>)` comes here. Level 4.

`install` wraps two methods of `transformers.GenerationMixin`: `_validate_generation_mode`, so that unsupported requests
are refused instead of ignored, and `_assisted_decoding`, which runs the tree loop. Both pass everything that is not a
[`DraftModel`] on to the original. `uninstall` restores the originals. If transformers changes the methods, `install`
leaves them alone and says that [`TreeDecoder`] still works.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from transformers import GenerationMixin
from transformers.generation import GenerationMode

from .loop import tree_decode
from .misread import refuse_misread
from .request import as_draft, check_mode


_EXPECTED = {
    "_validate_generation_mode": ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": (
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    ),
}
_originals: dict[str, Any] = {}


def _wrap_validate(original: Any) -> Any:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, str):
            raise ValueError(
                f"`assistant_model={assistant!r}` is a string. Load it first: `gto_hf.AutoDraft.from_pretrained(...)` for a "
                "draft, `AutoModelForCausalLM.from_pretrained(...)` for a small model."
            )
        draft = as_draft(assistant)
        if draft is None:
            refuse_misread(assistant)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        # The stock comparison of two tokenizers makes no sense for a draft head; our own checks replace it.
        check_mode(self, draft, generation_config)
        rest = {k: v for k, v in generation_mode_kwargs.items() if k not in ("assistant_model", "assistant_tokenizer")}
        # Of the stock limits those of plain decoding are left: assisted decoding's (one sequence) are not ours.
        mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        return original(self, mode, generation_config, rest)

    return _validate_generation_mode


def _wrap_assisted(original: Any) -> Any:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        draft = as_draft(assistant_model)
        if draft is None:
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        for name in ("tokenizer", "assistant_tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        return tree_decode(self, input_ids, *args, draft=draft, **kwargs)

    return _assisted_decoding


def install() -> bool:
    """
    Let `generate` on every model take a draft as `assistant_model`. Idempotent; `import gto_hf` calls it.

    Returns:
        `bool`: Whether the hook is in place.
    """
    if _originals:
        return True
    for name, expected in _EXPECTED.items():
        found = tuple(inspect.signature(getattr(GenerationMixin, name, lambda: None)).parameters)
        if found != expected:
            warnings.warn(
                f"This transformers has another `GenerationMixin.{name}` than gto-hf knows ({found}), so "
                "`generate(assistant_model=draft)` is not available. Use "
                "`model.generate(..., custom_generate=gto_hf.TreeDecoder(draft))`."
            )
            return False
    for name, wrap in (("_validate_generation_mode", _wrap_validate), ("_assisted_decoding", _wrap_assisted)):
        _originals[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, wrap(_originals[name]))
    return True


def uninstall() -> None:
    """Restore transformers' own methods. Idempotent."""
    while _originals:
        name, original = _originals.popitem()
        setattr(GenerationMixin, name, original)
