# SPDX-License-Identifier: Apache-2.0
"""What decoding with a draft can be asked for. Level 4: every refusal happens here, before any forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from gto_hf.drafts import DraftModel
from gto_hf.target import Route, decoding_route, position_limit, rope_types, unwrap

from .cache import prepare_cache
from .processors import check_processors


def as_draft(assistant: Any) -> DraftModel | None:
    """The draft inside an `assistant_model` (PEFT and compile wrappers looked through), or None."""
    if isinstance(assistant, DraftModel):
        return assistant
    if not isinstance(assistant, nn.Module):
        return None
    inner = getattr(assistant, "_orig_mod", assistant)  # torch.compile
    inner = unwrap(inner)
    return inner if isinstance(inner, DraftModel) else None


def check_mode(target: nn.Module, draft: DraftModel, config: GenerationConfig) -> Route:
    """
    Refuse generation modes and pairings, knowing no inputs yet.

    Returns:
        [`Route`]: Whether this target checks trees or chains.

    Raises:
        ValueError: For beams, contrastive search, a second way of drafting, a target that can check neither trees nor
            chains, or a draft that does not fit the target.
    """
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"Drafts are checked against one continuation per sequence; `num_beams={config.num_beams}` is beam search. Set "
            "`num_beams=1`, or call `generate` without `assistant_model`."
        )
    if not config.do_sample and (config.penalty_alpha or 0) > 0:
        raise ValueError("Contrastive search (`penalty_alpha`) cannot use a draft. Unset it.")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "dola_layers"):
        if getattr(config, name, None):
            raise ValueError(
                f"`{name}` asks for another way of decoding than `assistant_model`. Unset one of the two."
            )
    if config.use_cache is False:
        raise ValueError("Drafts need the target's KV cache; `use_cache=False` was given. Leave it at its default.")
    route = decoding_route(target)
    draft.check_target(target)
    return route


def prepare_request(
    target: nn.Module,
    draft: DraftModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    processors: LogitsProcessorList,
) -> tuple[Route, Callable[[], None]]:
    """
    Refuse what the loop cannot serve, and put a cache in `model_kwargs` that drafted tokens can be removed from.

    Returns:
        [`Route`]: Whether to draft trees or chains; and what puts the cache's exchanged layers back at the end.

    Raises:
        ValueError: As [`check_mode`]; for virtual tokens (prompt tuning), for sharded generation, batches where only a chain is possible, guidance of a batch,
            caches that cannot drop rows, and texts across a `longrope` switch.
    Warns:
        If only a chain can be drafted, and if the text may grow past the draft's trained length or past
        [`position_limit`].
    """
    route = check_mode(target, draft, config)
    if model_kwargs.pop("synced_gpus", None):
        raise ValueError("Drafts do not run under ZeRO-3 or FSDP generation (`synced_gpus`).")
    owner = getattr(target.prepare_inputs_for_generation, "__self__", target)  # PEFT puts its own in place
    adapter = getattr(owner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False) and "PREFIX" not in str(adapter.peft_type):
        raise ValueError(
            f"This target has virtual tokens ({adapter.peft_type}), which drafts cannot read. Omit `assistant_model`."
        )
    embeds = model_kwargs.get("inputs_embeds")
    rows, prompt = input_ids.shape[0], max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
    if prompt == 0:
        raise ValueError("The prompt is empty: a draft needs at least one token to go on from.")
    if route.kind == "chain":
        if rows > 1:
            raise ValueError(
                f"{route.reason}; the {rows} rows of a batch would need different pasts. Loop over the rows, or call "
                "`generate` without `assistant_model`."
            )
        warn_once(target, f"{route.reason}, so a chain is drafted instead of a tree; the text is the same.")
    check_processors(processors, rows)
    embedded = 0 if input_ids.shape[1] else prompt  # tokens that `max_length` does not count
    _check_lengths(target, draft, config, embedded)
    tree = draft.tree
    nodes = tree.depth if route.kind == "chain" else tree.total_tokens
    model_kwargs["cache"], restore = prepare_cache(
        target,
        model_kwargs.get("cache"),
        rows=rows,
        columns=config.max_length + embedded,
        nodes=nodes,
        chain=route.kind == "chain",
    )
    return route, restore


def _check_lengths(target: nn.Module, draft: DraftModel, config: GenerationConfig, embedded: int) -> None:
    """Lengths at which positions change or a draft gets weak; `embedded` tokens are not counted by `max_length`."""
    longest, limit = config.max_length + embedded, position_limit(target)
    if limit is not None and longest > limit:
        if "longrope" in rope_types(target):
            raise ValueError(
                f"This target changes its rotary frequencies at {limit} tokens (`longrope`), and the text may grow to "
                f"{longest}. Keep `max_length` at or below {limit}, or omit `assistant_model`."
            )
        warnings.warn(
            f"The text may grow to {longest} tokens; the target's positions end or change at {limit}, and nothing is "
            "drafted past that."
        )
    own = draft.position_limit()
    if own is not None and longest > own:
        warn_once(
            draft,
            f"The text may grow to {longest} tokens; the draft's positions end at {own}, and nothing is drafted past that.",
        )
    trained = draft.config.trained_length
    if trained is not None and longest > trained:
        warn_once(
            draft,
            f"The text may grow to {longest} tokens; this draft was trained on up to {trained}. The text stays right, the "
            "acceptance length falls the further it goes.",
        )


_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def warn_once(about: nn.Module, message: str) -> None:
    """Warn, once for every model it is about."""
    said = _warned.setdefault(about, set())
    kind = message.split(";")[0].translate(str.maketrans("", "", "0123456789"))
    if kind not in said:
        said.add(kind)
        warnings.warn(message)
