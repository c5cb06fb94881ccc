# SPDX-License-Identifier: Apache-2.0
"""Which arguments a random call draws, and which of them must be refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from gto_hf import TreeConfig
from gto_hf.decoding.cache import _has_evicted
from tests.families import FAMILIES


TREES = {
    "usual": TreeConfig(depth=4, top_k=3, total_tokens=12),
    "root": TreeConfig(depth=1, top_k=1, total_tokens=1),
    "flat": TreeConfig(depth=1, top_k=4, total_tokens=4),
    "chain": TreeConfig(depth=6, top_k=1, total_tokens=6),
    "wide": TreeConfig(depth=3, top_k=8, total_tokens=30),
    "deep": TreeConfig(depth=8, top_k=2, total_tokens=10),
    "auto": TreeConfig(depth=5, top_k=4, total_tokens=24, auto=True),
}
# Name: share of the cases that draw it, and the values. What is not drawn is left at its default.
ARGUMENTS: dict[str, tuple[float, tuple]] = {
    # Models
    "family": (
        1.0,
        (
            *("llama", "mistral", "gemma3_text", "gemma2", "gpt2", "llama4_text", "deepseek_v3") * 2,
            "lfm2",
        ),
    ),
    "attention": (1.0, ("sdpa", "eager")),
    "draft": (1.0, ("oracle", "oracle", "oracle", "oracle", "uneven", "wrong", "tiny")),
    "miss": (1.0, (0.0, 0.3, 0.7)),
    "feature_layers": (1.0, ((1,), (2, 4, 7))),
    "draft_dtype": (0.12, (torch.bfloat16, torch.float16, torch.float64)),
    "tree": (1.0, tuple(TREES)),
    "route": (1.0, ("hook", "hook", "hook", "hook", "custom")),
    # Prompt
    "prompt_length": (1.0, (1, 2, 5, 9, 13, 20)),
    "rows": (1.0, (1, 1, 1, 1, 2, 3)),
    "padding": (0.5, (0, 1, 3)),  # columns before the longest row
    "omit_mask": (0.15, (True,)),
    "position_ids": (0.08, (0, 3)),
    "inputs_embeds": (0.1, ("alone", "with_ids")),
    # Length and stops
    "max_new_tokens": (1.0, (1, 2, 5, 9, 14, 20, 26)),
    "max_length": (0.2, (True,)),
    "eos_token_id": (0.55, ("one", "two", "never")),
    "pad_token_id": (0.15, (0, 3, 7, "eos")),
    "min_new_tokens": (0.07, (2, 6)),
    "min_length": (0.07, (4, 16)),
    "forced_eos_token_id": (0.09, (2, (5, 9))),
    "stop_strings": (0.14, ("one", "two", "several")),
    "stopping_criteria": (0.13, (5, 9)),
    # Processors
    "repetition_penalty": (0.09, (0.8, 1.3)),
    "no_repeat_ngram_size": (0.08, (1, 2, 3)),
    "encoder_repetition_penalty": (0.09, (0.7, 1.5)),
    "encoder_no_repeat_ngram_size": (0.09, (1, 2)),
    "bad_words_ids": (0.08, ([[7]], [[9, 11], [5], [20]])),
    "suppress_tokens": (0.08, ([8, 12], list(range(10, 30)))),
    "begin_suppress_tokens": (0.08, ([6], list(range(3, 40)))),
    "sequence_bias": (0.08, ({(10,): 6.0}, {(11, 12): 8.0, (13,): -4.0})),
    "exponential_decay_length_penalty": (0.09, ((2, 1.5), (6, 1.1))),
    "guidance_scale": (0.08, (1.5, 3.0)),
    "negative_prompt_ids": (0.5, (1, 4)),  # next to guidance only
    "watermarking_config": (0.1, ("greenlist", "selfhash", "synthid")),
    "renormalize_logits": (0.1, (True,)),
    "remove_invalid_values": (0.07, (True,)),
    "prefix_allowed_tokens_fn": (0.08, (2, 3)),
    "logits_processor": (0.15, ("stateless", "stateful")),
    # Sampling
    "do_sample": (0.45, (True,)),
    "temperature": (0.3, (0.3, 0.8, 1.7)),
    "top_k": (0.3, (0, 1, 3, 20)),
    "top_p": (0.2, (0.5, 0.9)),
    "min_p": (0.2, (0.02, 0.2)),
    "typical_p": (0.15, (0.4, 0.9)),
    "epsilon_cutoff": (0.15, (0.01, 0.1)),
    "eta_cutoff": (0.18, (0.01, 0.1)),
    "num_return_sequences": (0.2, (2, 3)),
    # Output
    "return_dict_in_generate": (0.65, (True,)),
    "output_scores": (0.2, (True,)),
    "output_logits": (0.2, (True,)),
    "output_hidden_states": (0.15, (True,)),
    "output_attentions": (0.25, (True,)),
    "streamer": (0.25, (True,)),
    # Cache
    "cache_implementation": (0.15, ("static", "dynamic")),
    "cache": (0.25, ("dynamic", "static", "static_with_room")),
    "continue": (0.5, ("draft", "stock")),  # who wrote the first part; with a cache of the user's only
    "prefill_chunk_size": (0.1, (1, 4, 7)),
    "as_config": (0.15, (True,)),
    # Refused
    "use_cache": (0.045, (False,)),
    "num_beams": (0.045, (2,)),
}
# Have an effect in sampling only.
SAMPLING = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_return_sequences",
}
# Read by `generate`'s configuration as they are.
CONFIGURED = SAMPLING | {
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale"),
    *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values", "min_new_tokens"),
    *("min_length", "return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"),
    *("output_attentions", "cache_implementation", "prefill_chunk_size", "use_cache", "num_beams"),
}


def cases(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """
    Draw combinations of arguments; each is a dict of what was drawn.

    Args:
        count (`int`): How many. seed (`int`): Case `i` of a seed is always the same.
    """
    for number in range(count):
        draw = random.Random(1_000_003 * seed + number)
        case = {}
        for name, (share, values) in ARGUMENTS.items():
            taken, value = draw.random() < share, draw.choice(values)
            if taken:
                case[name] = value
        yield {"seed": seed, "number": number} | _sensible(case, draw)


def _sensible(case: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Drop what would do nothing, or nearly always raise, next to the rest of a case."""
    family = FAMILIES[case["family"]]
    if case["attention"] not in family.attention:
        case["attention"] = family.attention[0]

    def drop(name: str, when: bool) -> None:
        if when:
            case.pop(name, None)

    # A few of these stay in, to see that both calls raise.
    rare = draw.random() < 0.1
    sampled = case.get("do_sample", False)
    drop("num_return_sequences", not sampled and not rare)
    if ("guidance_scale" in case or family.route == "chain") and draw.random() < 0.6:
        case["rows"] = 1  # more are refused
    drop("output_attentions", case["attention"] != "eager" or "return_dict_in_generate" not in case)
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        drop(name, "return_dict_in_generate" not in case)
    drop("cache", "cache_implementation" in case and not rare)
    if {"min_new_tokens", "min_length", "exponential_decay_length_penalty"} & set(case) and not rare:
        case.setdefault("eos_token_id", "one")
    drop("continue", "cache" not in case or "inputs_embeds" in case)
    drop("negative_prompt_ids", "guidance_scale" not in case)
    drop("prefill_chunk_size", "inputs_embeds" in case and not rare)
    drop("output_attentions", case.get("cache_implementation") == "static" and "window" in family.extra)
    if case.get("cache", "dynamic") != "dynamic" and not {"window", "chunk", "conv"}.isdisjoint(family.extra):
        case["cache"] = "dynamic"
    if written_rows(case) > 1 and case.get("logits_processor") == "stateful":
        case["logits_processor"] = "stateless"  # rows are processed in another order than in stock
    if case["route"] == "custom":
        drop("stop_strings", True)  # `generate` gives custom callables no tokenizer
    if refusal(case, None):  # let nothing raise before
        case.setdefault("eos_token_id", "one")
        drop("cache", "cache_implementation" in case)
        drop("num_return_sequences", not sampled)
    return case


def written_rows(case: dict[str, Any]) -> int:
    """Sequences that a case writes."""
    return case["rows"] * (case.get("num_return_sequences", 1) if case.get("do_sample") else 1)


def refusal(case: dict[str, Any], cache_: Any) -> str | None:
    """Why a call with a draft must be refused, or None. `cache_` is the user's, after stock wrote the first part."""
    rows = written_rows(case)
    if "num_beams" in case:
        return "num_beams"
    if "use_cache" in case and not ("inputs_embeds" in case and case["route"] == "custom"):
        return "use_cache"  # with embeddings `generate` turns it on before it calls a custom callable
    if FAMILIES[case["family"]].route == "chain" and rows > 1:
        return "rows"
    if "guidance_scale" in case and rows > 1:
        return "guidance_scale"
    if rows > 1 and cache_ is not None and any(_has_evicted(x) for x in cache_.layers if hasattr(x, "sliding_window")):
        return "sliding window"
    return None


def drawn(case: dict[str, Any]) -> list[str]:
    """Names of the arguments of a case that can have an effect."""
    names = [name for name in case if name not in ("seed", "number")]
    return [name for name in names if name not in SAMPLING or "do_sample" in case]
