# SPDX-License-Identifier: Apache-2.0
"""Counts of one or many decoding runs. Level 4: sums only, so they merge; every ratio is derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodingStatistics:
    """
    What tree decoding did. Add two to merge them; `dataclasses.asdict` and `DecodingStatistics(**..)` go to JSON and back.

    The first token comes from the prefill and belongs to no round. Every round is one target forward; it emits the
    accepted drafted tokens and, unless a stop rule cuts it before, one bonus token of the target's own. A last round that
    EOS or a length limit cuts counts as a round, with the tokens that it emitted: if its last token was drafted (an EOS
    of the draft's, or the last token that fits), it has no bonus token.

    Attributes:
        emitted_tokens (`int`): New tokens, prefill's first one included.
        rounds (`int`): Tree rounds, counted per sequence, the last (possibly cut) one included.
        accepted_histogram (`list[int]`): Entry `i` counts rounds that emitted `i` drafted tokens.
        bonus_tokens (`int`): Tokens the target added at the end of a round.
        drafted_tokens (`int`): Tree nodes that the target checked, over all sequences.
        target_forwards (`int`): One per prefill and one per round of a whole batch.
        draft_forwards (`int`): Forwards of the draft, reading accepted tokens included.
        plain_rounds (`int`): Rounds in which an automatic tree stayed empty because none was worth its time.
        runs (`int`): Sequences decoded: rows of all `generate` calls.
    """

    emitted_tokens: int = 0
    rounds: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    bonus_tokens: int = 0
    drafted_tokens: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    plain_rounds: int = 0
    runs: int = 0

    def start(self, rows: int) -> None:
        """Count a prefill that emitted the first token of `rows` sequences."""
        self.runs += rows
        self.emitted_tokens += rows
        self.target_forwards += 1

    def add_rounds(self, rows: list[tuple[int, bool]], drafted: int) -> None:
        """
        Count one target forward.

        Args:
            rows (`list[tuple[int, bool]]`): Per sequence that was not done: drafted tokens emitted, and whether a bonus token
                followed. drafted (`int`): Nodes checked per sequence.
        """
        for accepted, bonus in rows:
            missing = accepted + 1 - len(self.accepted_histogram)
            self.accepted_histogram.extend([0] * missing)
            self.accepted_histogram[accepted] += 1
            self.rounds += 1
            self.bonus_tokens += bonus
            self.emitted_tokens += accepted + bonus
            self.drafted_tokens += drafted
        self.target_forwards += 1

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(length * count for length, count in enumerate(self.accepted_histogram))

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens emitted per round, bonus not counted; NaN without a round."""
        return self.accepted_tokens / self.rounds if self.rounds else float("nan")

    @property
    def tau(self) -> float:
        """
        Acceptance length: tokens emitted per target forward after the prefill, bonus counted; NaN without a round.

        Over several runs this is the micro average (total by total).
        """
        return (self.accepted_tokens + self.bonus_tokens) / self.rounds if self.rounds else float("nan")

    def acceptance_by_depth(self, *, conditional: bool = False) -> list[float]:
        """
        How often the drafted token at depth 1, 2, .. was emitted.

        Args:
            conditional (`bool`, *optional*, defaults to `False`):
                Divide the rounds that reached depth `k` by those that reached depth `k - 1` (the figure of papers that
                call it `(k-1)-α`) instead of by all rounds (the figure of serving engines).

        Returns:
            `list[float]`: Up to the deepest depth reached. The unconditional ones add up to `mean_accepted`.
        """
        reached = [sum(self.accepted_histogram[depth:]) for depth in range(len(self.accepted_histogram))]
        return [
            now / (before if conditional else reached[0]) for before, now in zip(reached, reached[1:], strict=False)
        ]

    def __add__(self, other: DecodingStatistics) -> DecodingStatistics:
        mine, theirs = self.accepted_histogram, other.accepted_histogram
        size = max(len(mine), len(theirs))
        histogram = [sum(h[i] for h in (mine, theirs) if i < len(h)) for i in range(size)]
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "accepted_histogram"
        }
        return DecodingStatistics(accepted_histogram=histogram, **sums)
