# SPDX-License-Identifier: Apache-2.0
"""
Random `generate` arguments, with a draft and without: the same text, scores, states, cache, stream and refusals.

`cases` draws combinations; every case runs stock `generate` first, builds a draft that knows that text (or one that knows
nothing), and runs `generate` again with it. `GTO_HF_FUZZ=2000` runs more cases than the default, `GTO_HF_FUZZ_SEED=1` others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from gto_hf import TreeConfig, TreeDecoder
from gto_hf.decoding.cache import _has_evicted
from gto_hf.tree import CostCurve
from tests.families import FAMILIES, VOCAB
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_tokenizer


COUNT = int(os.environ.get("GTO_HF_FUZZ", "300"))
SEED = int(os.environ.get("GTO_HF_FUZZ_SEED", "0"))
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
OUTCOMES: dict[int, str] = {}  # of the cases that ran: "compared", "refused" or "stock raises"


# ---------------------------------------------------------------- cases
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
    if _rows(case) > 1 and case.get("logits_processor") == "stateful":
        case["logits_processor"] = "stateless"  # rows are processed in another order than in stock
    if case["route"] == "custom":
        drop("stop_strings", True)  # `generate` gives custom callables no tokenizer
    if refusal(case, None):  # let nothing raise before
        case.setdefault("eos_token_id", "one")
        drop("cache", "cache_implementation" in case)
        drop("num_return_sequences", not sampled)
    return case


def _rows(case: dict[str, Any]) -> int:
    """Sequences that a case writes."""
    return case["rows"] * (case.get("num_return_sequences", 1) if case.get("do_sample") else 1)


def refusal(case: dict[str, Any], cache_: Any) -> str | None:
    """Why a call with a draft must be refused, or None. `cache_` is the user's, after stock wrote the first part."""
    rows = _rows(case)
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


# ---------------------------------------------------------------- what users pass in
class _Bias(LogitsProcessor):
    """Stateless: shifts the scores by a function of each row's length and last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids[:, -1:] if input_ids.shape[1] else torch.zeros(len(input_ids), 1, dtype=torch.long)
        vocabulary = torch.arange(scores.shape[1])
        return scores + 2 * ((vocabulary * 7 + last * 5 + input_ids.shape[1]) % 11 == 0)


class _Counting(LogitsProcessor):
    """Stateful: bans a token that depends on how often it was called, and remembers the prefixes."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.arange(3, VOCAB, 1 + len(self.seen) % 5), -torch.inf)


class _StopAfter(StoppingCriteria):
    """Stops a row at a token that a number divides, in the second half of the text; remembers the lengths it saw."""

    def __init__(self, divisor: int, start: int) -> None:
        self.divisor, self.start, self.lengths = divisor, start, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -1] % self.divisor == 0) & (input_ids.shape[1] > self.start)


class _Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.ids.extend(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def _allowed(every: int) -> Any:
    """A `prefix_allowed_tokens_fn` that depends on the prompt's number and on the prefix."""

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        last = int(ids[-1]) if len(ids) else 0
        return [token for token in range(2, VOCAB) if (token + prompt + last) % every]

    return allowed


def _watermark(kind: str) -> Any:
    if kind == "synthid":
        return SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, context_history_size=16)
    return WatermarkingConfig(bias=4.0, seeding_scheme="selfhash" if kind == "selfhash" else "lefthash")


# ---------------------------------------------------------------- one call
@cache
def _target(family: str, attention: str) -> PreTrainedModel:
    return FAMILIES[family].build(attention=attention)


@dataclass
class Call:
    """
    What one `generate` call did.

    Attributes:
        output (`Any`): Its return value. error (`Exception`): What it raised instead.
        forwards (`int`): Forwards of the target.
        objects (`dict`): Streamer, processor, criterion and cache that were passed in.
        random (`torch.Tensor`): State of the generator after it.
    """

    output: Any = None
    error: Exception | None = None
    forwards: int = 0
    objects: dict[str, Any] = field(default_factory=dict)
    random: torch.Tensor | None = None

    @property
    def sequences(self) -> torch.Tensor:
        """The ids, in either form of the output."""
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


class Case:
    """A drawn case on its target: prompts, arguments and calls."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.target = _target(case["family"], case["attention"])
        self.rows = _rows(case)
        draw = random.Random(case["number"])
        length, rows, extra = case["prompt_length"], case["rows"], case.get("padding", 0)
        pads = [extra + (draw.randrange(length) if row and "padding" in case else 0) for row in range(rows)]
        self.ids = torch.tensor([[draw.randrange(3, VOCAB) for _ in range(length + extra)] for _ in range(rows)])
        columns = torch.arange(length + extra)
        self.mask = (columns >= torch.tensor(pads)[:, None]).long()
        self.stops: dict[str, Any] = {}
        pad = case.get("pad_token_id", 0)
        self.ids[self.mask == 0] = 0 if pad == "eos" else pad
        self.embedded = case.get("inputs_embeds")
        self.static = "static" in f"{case.get('cache_implementation')} {case.get('cache')}"

    # ------------------------------------------------------------------ arguments
    def choose_stops(self, text: list[int]) -> None:
        """Stop tokens and strings that really come up, from the text without them."""
        case, count, stops = self.case, len(text), {}
        draw = random.Random(case["number"] + 1)
        picked = [text[draw.randrange(count)] for _ in range(3)]
        if "eos_token_id" in case:
            stops["eos_token_id"] = {"one": picked[0], "two": [picked[0], 2], "never": 1}[case["eos_token_id"]]
        if "stop_strings" in case:
            decode = tiny_tokenizer().decode
            at = draw.randrange(count)
            strings = {"one": decode(text[at]), "two": decode(text[at : at + 2])}
            strings["several"] = [*strings.values(), "~~~"]
            stops["stop_strings"] = strings[case["stop_strings"]] or "~~~"
        self.stops = stops

    def pad_token_id(self) -> int:
        """The padding token of the output."""
        pad, eos = self.case.get("pad_token_id", 0), self.stops.get("eos_token_id") or 0
        return (eos[0] if isinstance(eos, list) else eos) if pad == "eos" else pad

    def _config(self, columns: int, stops: bool) -> dict[str, Any]:
        """What may also stand in a `GenerationConfig`."""
        case = self.case
        config = {name: case[name] for name in CONFIGURED if name in case}
        config["do_sample"] = case.get("do_sample", False)
        config["eos_token_id"] = None
        if stops:
            config |= self.stops
        config["pad_token_id"] = self.pad_token_id()
        if "forced_eos_token_id" in case:
            forced = case["forced_eos_token_id"]
            config["forced_eos_token_id"] = list(forced) if isinstance(forced, tuple) else forced
        if "watermarking_config" in case:
            config["watermarking_config"] = _watermark(case["watermarking_config"])
        if "max_length" in case:
            config["max_length"] = case["max_new_tokens"] + columns
        else:
            config["max_new_tokens"] = case["max_new_tokens"]
        return config

    def arguments(self, ids: torch.Tensor, mask: torch.Tensor, cache_: Any, *, stops: bool = True) -> dict[str, Any]:
        """Fresh keyword arguments of `generate`."""
        case, config = self.case, self._config(ids.shape[1], stops)
        kwargs = self._inputs(ids, mask)
        if case.get("as_config"):
            kwargs["generation_config"] = config
            kwargs["eos_token_id"] = config["eos_token_id"]  # None in a config object means: the model's own
        else:
            kwargs |= config
        if "stop_strings" in config:
            kwargs["tokenizer"] = tiny_tokenizer()
        if cache_ is not None:
            kwargs["cache"] = cache_
        if "prefix_allowed_tokens_fn" in case:
            kwargs["prefix_allowed_tokens_fn"] = _allowed(case["prefix_allowed_tokens_fn"])
        if "logits_processor" in case:
            kwargs["logits_processor"] = [_Counting() if case["logits_processor"] == "stateful" else _Bias()]
        if "stopping_criteria" in case and stops:
            start = case["max_new_tokens"] // 2 + (0 if self.embedded == "alone" else ids.shape[1])
            kwargs["stopping_criteria"] = [_StopAfter(case["stopping_criteria"], start)]
        if "negative_prompt_ids" in case:
            kwargs["negative_prompt_ids"] = ids[:, -case["negative_prompt_ids"] :].flip(1)
        if "streamer" in case and "num_beams" not in case:
            kwargs["streamer"] = _Collect()
        return kwargs

    def _inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.embedded != "alone":
            kwargs["input_ids"] = ids
        if self.embedded:
            kwargs["inputs_embeds"] = self.target.get_input_embeddings()(ids).detach()
        if "omit_mask" not in self.case:
            kwargs["attention_mask"] = mask
        if "position_ids" in self.case:
            kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + self.case["position_ids"]
        return kwargs

    def new_cache(self) -> Any:
        """The user's cache, if the case has one."""
        kind = self.case.get("cache")
        if kind is None:
            return None
        if kind == "dynamic":
            return DynamicCache(config=self.target.config)
        parts = 2 if "continue" in self.case else 1
        # A batch needs one column more than the text (see `prepare_cache`).
        columns = self.ids.shape[1] + parts * self.case["max_new_tokens"] - (_rows(self.case) == 1)
        return StaticCache(config=self.target.config, max_cache_len=columns + 9 * (kind == "static_with_room"))

    # ------------------------------------------------------------------ calls
    def call(self, kwargs: dict[str, Any], draft: Any = None) -> Call:
        """One `generate` call from the case's seed. Changes `kwargs`."""
        call = Call(objects={k: kwargs.get(k) for k in ("streamer", "cache", "logits_processor", "stopping_criteria")})
        if draft is not None and self.case["route"] == "custom":
            streamer = kwargs.pop("streamer", None)
            kwargs["custom_generate"] = TreeDecoder(draft, streamer=streamer)
        elif draft is not None:
            kwargs["assistant_model"] = draft

        def count(*_: Any) -> None:
            call.forwards += 1

        hook = self.target.register_forward_pre_hook(count)
        torch.manual_seed(self.case["number"])
        try:
            if isinstance(config := kwargs.get("generation_config"), dict):
                kwargs["generation_config"] = GenerationConfig(**config)
            call.output = self.target.generate(**kwargs)
        except Exception as error:  # any: compared with the other call's
            call.error = error
        finally:
            hook.remove()
        call.random = torch.get_rng_state()
        return call

    def draft(self, texts: list[torch.Tensor]) -> Any:
        """The case's draft, for the texts that stock wrote."""
        case = self.case
        tree = TREES[case["tree"]]
        if case["draft"] == "tiny":
            draft = tiny_draft(self.target, tree=tree, seed=case["number"])
        else:
            known = {"wrong": 0, "uneven": 1}.get(case["draft"], len(texts))  # rows whose text the draft knows
            texts = [text if i < known else torch.randint(3, VOCAB, text.shape) for i, text in enumerate(texts)]
            draft = OracleDraft.for_texts(
                self.target,
                texts,
                tree=tree,
                feature_layers=case["feature_layers"],
                seed=case["number"],
                miss=case["miss"],
            )
        if tree.auto:
            draft.costs = CostCurve((0, 8, 24), (1.0, 1.1, 1.5), 0.1, 0.05)
        return draft.to(case["draft_dtype"]) if "draft_dtype" in case else draft

    def texts(self, prompt: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor) -> list[torch.Tensor]:
        """Every row's text from its first token on."""
        each = len(sequences) // len(prompt)
        prompt, mask = prompt.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)
        start = 0 if self.embedded == "alone" else prompt.shape[1]
        whole = torch.cat([prompt, sequences[:, start:]], dim=1)
        return [row[int((seen.cumsum(0) == 0).sum()) :] for row, seen in zip(whole, mask, strict=True)]


# ---------------------------------------------------------------- comparing
def _ends(case: Case, call: Call, kwargs: dict[str, Any], start: int) -> list[int]:
    """New tokens of each row, up to and with the one that stopped it."""
    new = call.sequences[:, start:]
    eos = case.stops.get("eos_token_id")
    if eos is None:
        return [new.shape[1]] * len(new)
    stop = torch.isin(new, torch.tensor(eos))
    criteria: list[Any] = []
    if "stopping_criteria" in case.case:
        used = kwargs["stopping_criteria"][0]
        criteria.append(_StopAfter(used.divisor, used.start))
    if "tokenizer" in kwargs:
        criteria.append(StopStringCriteria(stop_strings=case.stops["stop_strings"], tokenizer=kwargs["tokenizer"]))
    for step in range(new.shape[1]):
        for criterion in criteria:
            stop[:, step] |= criterion(call.sequences[:, : start + step + 1], None)
    return [int(row.nonzero()[0]) + 1 if row.any() else new.shape[1] for row in stop]


def _close(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Forwards of different width round differently, and the large random weights amplify it; texts are compared exactly."""
    assert mine.shape == theirs.shape, (name, mine.shape, theirs.shape)
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3, msg=lambda text: f"{name}: {text}")


def _compare_records(case: Case, stock: Call, tree: Call, ends: list[int]) -> None:
    """Scores, logits, states, attentions of every row's own tokens."""
    asked = case.case
    for name in ("scores", "logits"):
        theirs, mine = getattr(stock.output, name), getattr(tree.output, name)
        if f"output_{name}" not in asked:
            assert mine is None
            continue
        assert len(mine) == len(theirs), name
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            live = [row for row, end in enumerate(ends) if step < end]
            if name == "scores" and asked.get("watermarking_config") == "synthid":
                a, b = a.softmax(-1), b.softmax(-1)  # logarithms of differences: small ones are mostly rounding
            _close(f"{name}[{step}]", a[live], b[live])
    for name in ("hidden_states", "attentions"):
        theirs, mine = getattr(stock.output, name), getattr(tree.output, name)
        if f"output_{name}" not in asked:
            assert mine is None
            continue
        assert len(mine) == len(theirs), name
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert len(a) == len(b)
            live = [row for row, end in enumerate(ends) if step < end]
            for layer, (x, y) in enumerate(zip(a, b, strict=True)):
                if y is None:
                    assert x is None
                    continue
                if case.static and x.shape[-2] == case.mask.shape[1] > 1:  # padding looks at all columns alike
                    read = case.mask.repeat_interleave(case.rows // len(case.mask), 0)
                    read = read[:, :, None] if x.ndim == 3 else read[:, None, :, None]
                    x, y = x * read, y * read
                if name == "attentions":
                    x, y = _same_columns(x, y, case.static)
                assert x.shape == y.shape, (name, step, layer, x.shape, y.shape)
                _close(f"{name}[{step}][{layer}]", x[live], y[live])


def _same_columns(mine: torch.Tensor, theirs: torch.Tensor, static: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attentions to the columns that both have; there is nothing in the others.

    Static caches have room behind the text, as much as they were made for. Caches that keep everything, which batches
    need, have columns before the window.
    """
    columns = min(mine.shape[-1], theirs.shape[-1])
    some = slice(None, columns) if static else slice(-columns, None)
    for attention in (mine, theirs):
        if attention.shape[-1] > columns:
            assert not (attention[..., columns:] if static else attention[..., :-columns]).any()
    return mine[..., some], theirs[..., some]


def _compare(case: Case, stock: Call, tree: Call, kwargs: dict[str, Any], start: int) -> None:
    """All that must be equal, and for sampled batches all that must hold."""
    asked = case.case
    same = case.rows == 1 or "do_sample" not in asked or asked.get("top_k") == 1
    assert type(tree.sequences) is torch.Tensor and tree.sequences.dtype == stock.sequences.dtype
    ends = _ends(case, tree, kwargs, start)
    if same:
        assert tree.sequences.tolist() == stock.sequences.tolist()
        if "streamer" in asked:
            mine, theirs = tree.objects["streamer"], stock.objects["streamer"]
            assert mine.ids == theirs.ids and mine.ends == theirs.ends == 1
        caches = [call.objects["cache"] or getattr(call.output, "cache", None) for call in (stock, tree)]
        if None not in caches:
            assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()), "cache length"
        if "return_dict_in_generate" in asked:
            _compare_records(case, stock, tree, ends)
    else:
        _check_sampled_batch(case, stock, tree, ends, start)
    if case.rows == 1:
        assert torch.equal(stock.random, tree.random), "the generator was drawn from more or less often"
        if asked.get("logits_processor") == "stateful":
            assert tree.objects["logits_processor"][0].seen == stock.objects["logits_processor"][0].seen
        if "stopping_criteria" in asked:
            assert tree.objects["stopping_criteria"][0].lengths == stock.objects["stopping_criteria"][0].lengths
    if "return_dict_in_generate" in asked:
        _check_statistics(case, tree, ends, start)


def _check_sampled_batch(case: Case, stock: Call, tree: Call, ends: list[int], start: int) -> None:
    """A batch draws its rows' random numbers in another order, so only the form of the text is known."""
    mine, theirs = tree.sequences, stock.sequences
    assert len(mine) == len(theirs) and start < mine.shape[1] <= start + case.case["max_new_tokens"]
    assert torch.equal(mine[:, :start], theirs[:, :start])
    new = mine[:, start:]
    assert max(ends) == new.shape[1]
    pad = case.pad_token_id()
    for row, end in zip(new, ends, strict=True):
        assert (row[end:] == pad).all()
    if "suppress_tokens" in case.case:
        for row, end in zip(new, ends, strict=True):
            assert not torch.isin(row[:end], torch.tensor(case.case["suppress_tokens"])).any()
    if "output_scores" in case.case:
        for step, scores in enumerate(tree.output.scores):
            for row, end in enumerate(ends):
                assert step >= end or scores[row, new[row, step]] > -torch.inf
    if "streamer" in case.case:
        streamer = tree.objects["streamer"]
        assert streamer.ids[-new.numel() :] == new.T.flatten().tolist() and streamer.ends == 1


def _check_statistics(case: Case, tree: Call, ends: list[int], start: int) -> None:
    """Counts add up, and the forwards that were counted are the forwards that ran."""
    counts = tree.output.statistics
    new = tree.sequences.shape[1] - start
    stopped = not {"stopping_criteria", "stop_strings"}.isdisjoint(case.case)
    open_end = case.rows > 1 and stopped and "eos_token_id" not in case.stops
    # Without an end token, a row that a criterion stopped goes on, maybe past where another one stops the batch.
    assert counts.emitted_tokens == sum(ends) or open_end and counts.emitted_tokens > sum(ends), (counts, ends)
    assert counts.emitted_tokens == counts.runs + counts.accepted_tokens + counts.bonus_tokens
    assert counts.runs == case.rows and counts.rounds == sum(counts.accepted_histogram)
    forwards = counts.target_forwards
    if "prefill_chunk_size" in case.case:  # one prefill, but one forward per chunk
        forwards += case.chunks - 1
    if "guidance_scale" in case.case:  # forwards of its own, one per token
        forwards += new
    assert tree.forwards == forwards, (tree.forwards, counts)


# ---------------------------------------------------------------- tests
def run(drawn_case: dict[str, Any]) -> str:
    """Run a case; returns how it came out."""
    case = Case(drawn_case)
    ids, mask, first = case.ids, case.mask, case.new_cache()
    second = case.new_cache()
    if refusal(drawn_case, None):
        case.choose_stops(ids[0].tolist())
        draft = case.draft([ids[0]])
        return _expect_refusal(case, case.call(case.arguments(ids, mask, second), draft))
    if {"eos_token_id", "stop_strings"} & set(drawn_case):
        probe = case.call(case.arguments(ids, mask, case.new_cache(), stops=False))
        start = 0 if case.embedded == "alone" else ids.shape[1]
        case.choose_stops(ids[0].tolist() if probe.error else probe.sequences[0, start:].tolist())
    stock = case.call(case.arguments(ids, mask, first))
    text = ids if stock.error else stock.sequences
    draft = case.draft([ids[0]] if stock.error else case.texts(ids, mask, text))
    by_stock = drawn_case.get("continue") == "stock"
    tree = case.call(kwargs := case.arguments(ids, mask, second), None if by_stock else draft)
    if stock.error:
        assert tree.error is not None, f"stock raises {stock.error!r}"
        return "stock raises"
    if tree.error:
        raise tree.error
    start = 0 if case.embedded == "alone" else ids.shape[1]
    case.chunks = -(-ids.shape[1] // drawn_case.get("prefill_chunk_size", ids.shape[1]))
    if not by_stock:
        _compare(case, stock, tree, kwargs, start)
    if "continue" not in drawn_case or tree.sequences.tolist() != stock.sequences.tolist():
        return "compared"
    # The same arguments again, from the text and the cache of before.
    ends = _ends(case, stock, kwargs, start)
    each = case.rows // len(mask)
    written = (torch.arange(stock.sequences.shape[1] - start) < torch.tensor(ends)[:, None]).long()
    mask = torch.cat([mask.repeat_interleave(each, 0), written], dim=1)
    ids = stock.sequences
    if each > 1:
        return "compared"  # the prompt of a second call would be repeated again
    reason = refusal(drawn_case, second)
    stock = case.call(case.arguments(ids, mask, first))
    draft = case.draft([ids[0]] if stock.error else case.texts(ids, mask, stock.sequences))
    tree = case.call(kwargs := case.arguments(ids, mask, second), draft)
    if reason:
        return _expect_refusal(case, tree)
    if stock.error:
        assert tree.error is not None, f"stock raises {stock.error!r}"
        return "stock raises"
    if tree.error:
        raise tree.error
    case.chunks = 1  # only the last token is not in the cache yet
    _compare(case, stock, tree, kwargs, ids.shape[1])
    return "compared"


def _expect_refusal(case: Case, call: Call) -> str:
    assert isinstance(call.error, ValueError), f"not refused: {call.error!r}"
    assert call.forwards == 0, "refused after a forward"
    return "refused"


ALL = list(cases(COUNT, SEED))


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.filterwarnings("ignore")
def test_a_random_call_equals_stock(number):
    case = ALL[number]
    try:
        OUTCOMES[number] = run(case)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nin {case}") from error


def test_every_argument_was_drawn_and_few_cases_were_refused():
    # Refused cases say nothing about their other arguments.
    reasons = [refusal(case, None) for case in ALL]
    counts = Counter(name for case, reason in zip(ALL, reasons, strict=True) if reason is None for name in drawn(case))
    counts += Counter(reasons)
    rare = {name: counts[name] for name in ARGUMENTS if counts[name] < 10}
    assert COUNT < 300 or not rare
    assert len(ALL) - reasons.count(None) < 0.2 * COUNT
    if len(OUTCOMES) < COUNT:
        pytest.skip("not all cases ran in this process, or some failed")
    outcomes = Counter(OUTCOMES.values())
    assert outcomes["refused"] < 0.2 * COUNT, outcomes
    assert outcomes["stock raises"] < 0.1 * COUNT, outcomes
