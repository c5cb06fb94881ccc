# SPDX-License-Identifier: Apache-2.0
"""What tree decoding can be asked for. Level 4: every refusal happens here, before any forward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from gto_hf.drafts import DraftModel
from gto_hf.target import check_tree_support, position_limit, rope_types, unwrap


def as_draft(assistant: Any) -> DraftModel | None:
    """The draft inside an `assistant_model` (PEFT and compile wrappers looked through), or None."""
    if isinstance(assistant, DraftModel):
        return assistant
    if not isinstance(assistant, nn.Module):
        return None
    inner = getattr(assistant, "_orig_mod", assistant)  # torch.compile
    inner = unwrap(inner)
    return inner if isinstance(inner, DraftModel) else None


def check_mode(target: nn.Module, draft: DraftModel, config: GenerationConfig) -> None:
    """
    Refuse generation modes and pairings, knowing no inputs yet.

    Raises:
        ValueError: For beams, several return sequences, contrastive search, a recurrent or non-full-attention target,
            or a draft that does not fit the target.
    """
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"Draft trees verify one sequence; `num_beams={config.num_beams}` is beam search. Set `num_beams=1`, or "
            "call `generate` without `assistant_model`."
        )
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"`num_return_sequences={config.num_return_sequences}` is a batch; draft trees decode one sequence at a "
            "time. Call `generate` once per sequence."
        )
    if not config.do_sample and (config.penalty_alpha or 0) > 0:
        raise ValueError("Contrastive search (`penalty_alpha`) cannot use a draft. Unset it.")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if getattr(config, name, None):
            raise ValueError(
                f"`{name}` asks for another way of drafting than `assistant_model`. Unset one of the two."
            )
    if config.use_cache is False:
        raise ValueError(
            "Draft trees need the target's KV cache; `use_cache=False` was given. Leave it at its default."
        )
    check_tree_support(target)
    draft.check_target(target)


def check_inputs(
    target: nn.Module, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """
    Refuse inputs and outputs that the loop cannot serve.

    Raises:
        ValueError: For batches, embedding prompts, caches that cannot drop rows, sharded generation, positions of several
            axes, texts across a `longrope` switch, and for `output_attentions` or `output_hidden_states`.
    Warns:
        If the text may grow past [`position_limit`]: from there on no trees are drafted.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"Draft trees decode one sequence at a time, got a batch of {input_ids.shape[0]}. Loop over the rows, or "
            "call `generate` without `assistant_model`."
        )
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("Draft trees need the prompt's token ids: pass `input_ids`, not `inputs_embeds`.")
    if model_kwargs.get("synced_gpus"):
        raise ValueError("Draft trees do not run under ZeRO-3 or FSDP generation (`synced_gpus`).")
    for name in ("output_attentions", "output_hidden_states"):
        if model_kwargs.get(name) or (config.return_dict_in_generate and getattr(config, name)):
            raise ValueError(f"`{name}=True` is not available with draft trees. Unset it, or omit `assistant_model`.")
    positions = model_kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        found = "none" if positions is None else f"shape {tuple(positions.shape)}"
        raise ValueError(
            f"Draft trees need one position per token (`position_ids` of shape (1, length)), this target uses {found}. "
            "Call `generate` without `assistant_model`."
        )
    limit = position_limit(target)
    if limit is not None and config.max_length > limit:
        if "longrope" in rope_types(target):
            raise ValueError(
                f"This target changes its rotary frequencies at {limit} tokens (`longrope`), and the text may grow to "
                f"{config.max_length}. Keep `max_length` at or below {limit}, or omit `assistant_model`."
            )
        warnings.warn(
            f"The text may grow to {config.max_length} tokens; the target's positions end or change at {limit}, and no "
            "trees are drafted past that."
        )
    cache = model_kwargs.get("cache")
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError(
            f"Draft trees need a cache that can drop rejected rows, a plain `DynamicCache`; got {type(cache).__name__}. "
            "Leave `cache_implementation` unset."
        )
