# SPDX-License-Identifier: Apache-2.0
"""
One answer of one system, and all answers of it. Level 5.

Counts first: a run stores tokens, seconds and decoding counts per prompt; ratios are made at the end.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from gto_hf.decoding import DecodingStatistics


PLAIN = "plain generate"
# Sampling at a temperature is from the target's whole distribution: what its generation config cuts off is not cut off here.
WHOLE_DISTRIBUTION: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


@dataclass
class PromptRun:
    """
    One answer.

    Attributes:
        tokens (`list[int]`): New ids.
        seconds (`float`): Wall clock of the whole `generate` call, prefill included.
        statistics ([`DecodingStatistics`], *optional*): None for plain generation.
    """

    tokens: list[int]
    seconds: float
    statistics: DecodingStatistics | None = None


@dataclass
class SystemRun:
    """All answers of one system at one temperature, in prompt order."""

    name: str
    temperature: float
    answers: list[PromptRun] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        """Tokens written over all prompts."""
        return sum(len(a.tokens) for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Total tokens by total seconds, prefill included."""
        return self.new_tokens / sum(a.seconds for a in self.answers)

    @property
    def statistics(self) -> DecodingStatistics:
        """Counts summed over prompts."""
        return sum((a.statistics for a in self.answers if a.statistics), DecodingStatistics())

    @property
    def tau_micro(self) -> float:
        """Acceptance length: tokens by target forwards after the prefill, over all prompts (bonus counted)."""
        return self.statistics.tau

    @property
    def tau_macro(self) -> float:
        """Mean over prompts of each prompt's acceptance length; prompts that ended at their first token have none."""
        taus = [a.statistics.tau for a in self.answers if a.statistics and a.statistics.rounds]
        return sum(taus) / len(taus) if taus else float("nan")

    def speedup(self, plain: SystemRun) -> float:
        """SR: tokens per second over plain generation of the same prompts in the same run."""
        return self.tokens_per_second / plain.tokens_per_second

    def identical(self, plain: SystemRun) -> int:
        """Prompts whose text is the same, token for token, as plain generation's."""
        return sum(a.tokens == b.tokens for a, b in zip(self.answers, plain.answers, strict=True))

    def repetition(self, n: int = 4) -> float:
        """Share of n-grams that occurred before in the same answer: looping text inflates acceptance."""
        total = seen = 0
        for answer in self.answers:
            grams = [tuple(answer.tokens[i : i + n]) for i in range(len(answer.tokens) - n + 1)]
            total, seen = total + len(grams), seen + len(grams) - len(set(grams))
        return seen / total if total else 0.0


@torch.inference_mode()
def answer(
    target: Any,
    prompt: list[int],
    *,
    draft: Any = None,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    **generate_kwargs: Any,
) -> PromptRun:
    """
    One timed `generate` call.

    Args:
        target (`PreTrainedModel`): The model.
        prompt (`list[int]`): Prompt ids.
        draft ([`DraftModel`], *optional*): Decode with it; None is plain `generate`.
        temperature (`float`, *optional*, defaults to `0.0`): 0 is greedy. Nothing is cut off the distribution
            (`WHOLE_DISTRIBUTION`). What else the target's generation config says, such as a `repetition_penalty`, holds:
            [`generation_facts`] tells it.
        max_new_tokens (`int`, *optional*, defaults to `128`): Longest answer.
        seed (`int`, *optional*, defaults to `0`): Set before the call.
        **generate_kwargs: More arguments for `generate`.
    """
    ids = torch.tensor([prompt], device=target.device)
    sampling = {"do_sample": True, "temperature": temperature, **WHOLE_DISTRIBUTION} if temperature else {}
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **({"do_sample": False, "assistant_model": draft} | sampling | generate_kwargs),
    )
    tokens = output.sequences[0, len(prompt) :].tolist()  # waits for the device
    seconds = time.perf_counter() - start
    return PromptRun(tokens, seconds, getattr(output, "statistics", None))


def generation_facts(target: Any) -> dict[str, Any]:
    """What of the target's generation config shapes the answers of [`answer`]: processors, ends and the like, if any."""
    given = target.generation_config.to_diff_dict()
    set_here = {"do_sample", "temperature", "max_length", "max_new_tokens", *WHOLE_DISTRIBUTION}
    shapeless = {"transformers_version", "use_cache", "output_attentions", "output_hidden_states"}
    return {
        name: value
        for name, value in given.items()
        if name not in set_here | shapeless and not name.startswith("_") and value is not None
    }


def agreement(runs: list[SystemRun], drafts: Collection[str] | None = None) -> tuple[int, int]:
    """
    Answers that equal plain generation's at the same temperature, and how many were compared.

    Args:
        runs (`list[SystemRun]`): Plain generation among them.
        drafts (`Collection[str]`, *optional*): Systems to compare, by default all others. Stock's baselines draw other
            samples, so theirs say nothing about losslessness above temperature 0.
    """
    plain = {run.temperature: run for run in runs if run.name == PLAIN}
    drafted = [run for run in runs if run.name != PLAIN and (drafts is None or run.name in drafts)]
    return sum(r.identical(plain[r.temperature]) for r in drafted), sum(len(r.answers) for r in drafted)
