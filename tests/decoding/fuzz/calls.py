# SPDX-License-Identifier: Apache-2.0
"""A drawn case on its target: prompts, drafts and `generate` calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)

from gto_hf import TreeDecoder
from gto_hf.tree import CostCurve
from tests.families import FAMILIES, VOCAB
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft, tiny_tokenizer

from .arguments import CONFIGURED, TREES, written_rows
from .doubles import Bias, Collect, Counting, StopAfter, allowed_tokens, watermark


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
        self.rows = written_rows(case)
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
            config["watermarking_config"] = watermark(case["watermarking_config"])
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
            kwargs["prefix_allowed_tokens_fn"] = allowed_tokens(case["prefix_allowed_tokens_fn"])
        if "logits_processor" in case:
            kwargs["logits_processor"] = [Counting() if case["logits_processor"] == "stateful" else Bias()]
        if "stopping_criteria" in case and stops:
            start = case["max_new_tokens"] // 2 + (0 if self.embedded == "alone" else ids.shape[1])
            kwargs["stopping_criteria"] = [StopAfter(case["stopping_criteria"], start)]
        if "negative_prompt_ids" in case:
            kwargs["negative_prompt_ids"] = ids[:, -case["negative_prompt_ids"] :].flip(1)
        if "streamer" in case and "num_beams" not in case:
            kwargs["streamer"] = Collect()
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
        columns = self.ids.shape[1] + parts * self.case["max_new_tokens"] - (written_rows(self.case) == 1)
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
