# SPDX-License-Identifier: Apache-2.0
"""A draft's tensors under the names and in the shapes that an engine reads. Level 4."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from gto_hf.drafts import DraftModel

from .dialects import Dialect, optional_layer_keys


_FIRST_LAYERS = ("midlayer.", "layers.0.")


def engine_tensors(
    draft: DraftModel, dialect: Dialect, *, embedding: torch.Tensor | None, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """
    Every tensor that the engine is to read, on the CPU.

    A reduced vocabulary keeps its order and its map. A full one is put in the target's order and has no map: vLLM refuses a
    map there, and SafeAILab's has none.

    Args:
        draft ([`DraftModel`]): The draft.
        dialect ([`Dialect`]): As [`check_exportable`] gives it.
        embedding (`torch.FloatTensor` of shape `(V, H)`, *optional*): To store; None if the engine takes the target's.
        dtype (`torch.dtype`, *optional*): Of the weights; None keeps each one's.

    Raises:
        ValueError: If a tensor has no place in the dialect, or a required one is missing; names them.
    """
    config, made = draft.config, {}
    reduced = config.draft_vocab_size < config.vocab_size
    for key, value in draft.state_dict().items():
        if key == "embed_tokens.weight" or (key in ("d2t", "t2d") and not reduced):
            continue
        if key == "lm_head.weight" and not reduced:
            value = torch.empty_like(value).index_copy_(0, draft.kept_ids, value)
        made[_renamed(key, dialect)] = value
    if embedding is not None:
        made["embed_tokens.weight"] = embedding
    if "fc.bias" in dialect.required and "fc.bias" not in made:
        made["fc.bias"] = torch.zeros(config.hidden_size, dtype=made["fc.weight"].dtype)
    _check_keys(made, dialect, config.num_hidden_layers)
    return {key: _stored(value, dtype) for key, value in sorted(made.items())}


def _stored(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy with memory of its own, which safetensors wants; maps stay integers."""
    value = value.detach().to("cpu", copy=True).contiguous()
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _renamed(key: str, dialect: Dialect) -> str:
    for prefix in _FIRST_LAYERS:
        if key.startswith(prefix):
            return dialect.layer + key.removeprefix(prefix)
    return key


def _check_keys(made: dict[str, torch.Tensor], dialect: Dialect, layers: int) -> None:
    """Nothing may be missing, and nothing may be there that the engine would not read."""
    missing = [key for key in dialect.required_keys() if key not in made]
    if missing:
        raise ValueError(
            f"{dialect.engine} needs {', '.join(f'`{k}`' for k in missing)}, which this draft does not have."
        )
    known = [*dialect.required_keys(), *dialect.optional]
    known += [dialect.layer + key for key in optional_layer_keys(dialect)]
    known += [f"layers.{i}.*" for i in range(1, layers)]
    unread = [key for key in made if not any(fnmatchcase(key, pattern) for pattern in known)]
    if unread:
        raise ValueError(
            f"{dialect.engine} would not read {', '.join(f'`{k}`' for k in sorted(unread))} of this draft, so it cannot be "
            "exported there."
        )
