# SPDX-License-Identifier: Apache-2.0
"""
The sums behind every figure of an evaluation, and the figures. Level 5.

Counts first, ratios last: what is stored of an answer are sums, so answers, question sets and processes are merged by
adding. Every ratio is made of sums at the end. `docs/measuring.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gto_hf.decoding import DecodingStatistics, RoundTimes, RoundTrace

from .misalignment import accepted_columns, greedy_lengths


NAN = float("nan")


@dataclass
class Counts:
    """
    Sums over answers of one system. Add two to merge them; [`Counts.to_dict`] and [`Counts.from_dict`] go to JSON and back.

    Edge rules:

    - The token of the prefill belongs to no round. Stock assisted generation drafts before its prefill; what its first
      forward emits, one token or more, belongs to no round either (`first_tokens`).
    - A last round that EOS or a length limit cuts is a round, with the tokens that it emitted.
    - An answer that ended within the prefill has no round: it counts in `answers`, tokens and seconds, and in no τ.
    - Nothing can be accepted behind an EOS, so nodes below a drafted EOS add nothing to `expected_accepted`. Trees end
      before the length limit, so no node lies behind it.

    Attributes:
        statistics ([`DecodingStatistics`]): Rounds and what they accepted.
        answers, tokens (`int`): Answers, and new tokens in them.
        seconds (`float`): Wall clock of the `generate` calls, prefill included.
        first_seconds (`float`), first_tokens (`int`): Up to the first tokens that came out, and how many these were: the
            prefill, with what the draft does before the first round.
        tau_sum (`float`), tau_answers (`int`): Sum of the answers' own τ over those with a round (for the macro mean).
        target_seconds, draft_seconds, processor_seconds, round_seconds (`float`): Of the rounds, where seconds were
            recorded.
        traced_rounds (`int`): Rounds whose tree was recorded; the following are sums over them.
        expected_accepted (`float`): Sum over the tree's nodes of the target's path probability at temperature 1.
        observed_accepted (`int`): Drafted tokens that these rounds emitted.
        greedy_pruned, greedy_path (`int`): Rounds whose greedy path was not wholly in the tree; whose accepted tokens
            are the start of it.
        greedy_histogram (`list[int]`): Entry `i` counts rounds in which the greedy path alone would have had `i` drafted
            tokens accepted.
    """

    statistics: DecodingStatistics = field(default_factory=DecodingStatistics)
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_tokens: int = 0
    tau_sum: float = 0.0
    tau_answers: int = 0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    processor_seconds: float = 0.0
    round_seconds: float = 0.0
    traced_rounds: int = 0
    expected_accepted: float = 0.0
    observed_accepted: int = 0
    greedy_pruned: int = 0
    greedy_path: int = 0
    greedy_histogram: list[int] = field(default_factory=list)

    def add_times(self, times: Iterable[RoundTimes]) -> None:
        """Add the seconds of recorded rounds."""
        for each in times:
            self.target_seconds += each.target
            self.draft_seconds += each.draft
            self.processor_seconds += each.processors
            self.round_seconds += each.total

    def add_traces(self, rounds: list[RoundTrace], eos: Iterable[int] = ()) -> None:
        """Add the recorded trees of one `generate` call; `eos` are the tokens that end a text."""
        ends = set(eos)
        for trace, (length, kept) in zip(rounds, greedy_lengths(rounds), strict=True):
            accepted = len(accepted_columns(trace))
            self.traced_rounds += 1
            self.expected_accepted += expected_acceptance(trace, ends)
            self.observed_accepted += accepted
            self.greedy_pruned += not kept
            self.greedy_path += trace.emitted[:accepted] == trace.greedy[:accepted]
            self.greedy_histogram.extend([0] * (length + 1 - len(self.greedy_histogram)))
            self.greedy_histogram[length] += 1

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Counts:
        """From [`Counts.to_dict`]."""
        return cls(**{**values, "statistics": DecodingStatistics(**values["statistics"])})

    # ------------------------------------------------------------------ ratios
    @property
    def tau_micro(self) -> float:
        """Tokens emitted per round, bonus counted, total by total; NaN without a round."""
        return self.statistics.tau

    @property
    def tau_macro(self) -> float:
        """Mean over answers of each answer's own τ; NaN without a round."""
        return _ratio(self.tau_sum, self.tau_answers)

    @property
    def tau_without_bonus(self) -> float:
        """Drafted tokens emitted per round; NaN without a round."""
        return self.statistics.mean_accepted

    @property
    def tau_chain(self) -> float:
        """
        τ of a chain as deep as the tree, simulated: `1 + Σ_k P(the first k tokens of the greedy path are right)`.

        At the roots that the tree's rounds had; NaN where no tree was recorded.
        """
        return 1 + self.greedy_accepted

    @property
    def greedy_accepted(self) -> float:
        """Mean drafted tokens that the greedy path alone would have had accepted."""
        return _ratio(sum(n * count for n, count in enumerate(self.greedy_histogram)), self.traced_rounds)

    @property
    def expected(self) -> float:
        """Expected drafted tokens per round, by the target's probabilities at temperature 1."""
        return _ratio(self.expected_accepted, self.traced_rounds)

    @property
    def observed(self) -> float:
        """Drafted tokens per recorded round that were emitted: at temperature 1 its mean is `expected`."""
        return _ratio(self.observed_accepted, self.traced_rounds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens by seconds, prefill included."""
        return _ratio(self.tokens, self.seconds)

    @property
    def tokens_per_second_after_prefill(self) -> float:
        """Tokens after the first ones, by the seconds after them; NaN if nothing came after."""
        after = self.tokens - self.first_tokens
        return after / (self.seconds - self.first_seconds) if after else NAN

    def figures(self) -> dict[str, Any]:
        """Every ratio that needs no other system, by name; None where there is nothing to divide by."""
        statistics, rounds = self.statistics, self.traced_rounds
        host = self.round_seconds - self.target_seconds - self.draft_seconds - self.processor_seconds
        found = {
            "tau_macro": self.tau_macro,
            "tau_micro": self.tau_micro,
            "tau_without_bonus": self.tau_without_bonus,
            "tau_chain_simulated": self.tau_chain,
            "expected_accepted": self.expected,
            "observed_accepted": self.observed,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_after_prefill": self.tokens_per_second_after_prefill,
            "first_seconds": _ratio(self.first_seconds, self.answers),
            "greedy_path_pruned": _ratio(self.greedy_pruned, rounds),
            "accepted_is_greedy": _ratio(self.greedy_path, rounds),
            "greedy_accepted": self.greedy_accepted,
            "target_share": _ratio(self.target_seconds, self.round_seconds),
            "draft_share": _ratio(self.draft_seconds, self.round_seconds),
            "processor_share": _ratio(self.processor_seconds, self.round_seconds),
            "host_share": _ratio(host, self.round_seconds),
        }
        numbers = {name: None if value != value else value for name, value in found.items()}  # JSON has no NaN
        return numbers | {
            "acceptance_by_depth": statistics.acceptance_by_depth(),
            "acceptance_by_depth_conditional": statistics.acceptance_by_depth(conditional=True),
        }


def expected_acceptance(trace: RoundTrace, eos: set[int] = frozenset()) -> float:
    """
    Expected drafted tokens of a round whose tokens are sampled from the target at temperature 1: Σ over nodes of P(node).

    The next token is drawn from the target and followed while it is a child, so a node is emitted with the product of the
    target's probabilities along its path. Nodes below one of `eos` cannot be reached.
    """
    tokens, parents = trace.tree.tokens[0].tolist(), trace.tree.parents[0].tolist()
    path = [1.0]
    for column, probability in enumerate(trace.target_log_probs.double().exp().tolist()[1:], 1):
        parent = parents[column]
        ended = parent != 0 and tokens[parent] in eos
        path.append(0.0 if ended else path[parent] * probability)
    return sum(path) - 1.0


def simulated_tau(conditional: Iterable[float]) -> float:
    """
    `1 + Σ_k Π_{i<=k} a_i`: τ of a chain whose token `i` is right with probability `a_i`, given that those before it were.

    Args:
        conditional (`Iterable[float]`): `a_1, a_2, ..`. With `[0.7, 0.5, 0.4]` it is `1 + 0.7 + 0.35 + 0.14 = 2.19`.
    """
    tau, product = 1.0, 1.0
    for rate in conditional:
        product *= rate
        tau += product
    return tau


def _ratio(a: float, b: float) -> float:
    return a / b if b else NAN


def _sum(a: Any, b: Any) -> Any:
    if not isinstance(a, list):
        return a + b
    size = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0] * (size - len(a)), b + [0] * (size - len(b)), strict=True)]
