# SPDX-License-Identifier: Apache-2.0
"""What a training set holds: rows, rows skipped and why, how much is supervised, how much of that a draft can say. Level 4."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .encode import IGNORED
from .reasons import ADVICE, Note, Skip


LOW_COVERAGE = 0.9
MAX_GROUPS = 50  # values of a column that are told apart
OTHERS = "(others)"
SHOWN = 200  # characters of the first row that are printed


@dataclass
class Measured:
    """
    Tokens of some rows.

    Attributes:
        rows (`int`): Rows looked at. tokens (`int`): All of their tokens.
        supervised (`int`): Tokens that are trained. sayable (`int`): Those of them that the draft's vocabulary holds.
    """

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    sayable: int = 0

    @property
    def share(self) -> float:
        """Supervised of all tokens."""
        return self.supervised / max(self.tokens, 1)

    @property
    def coverage(self) -> float:
        """Supervised tokens that the draft can say, of all supervised tokens."""
        return self.sayable / max(self.supervised, 1)

    def add(self, tokens: int, supervised: int, sayable: int) -> None:
        """Count one more row."""
        self.rows += 1
        self.tokens += tokens
        self.supervised += supervised
        self.sayable += sayable

    def to_dict(self) -> dict[str, float]:
        """Counts and shares."""
        shares = {"supervised_share": self.share, "coverage": self.coverage}
        return {"rows": self.rows, "tokens": self.tokens, "supervised_tokens": self.supervised, **shares}


@dataclass
class DataReport:
    """
    Counts of a dataset's rows.

    Attributes:
        name (`str`): Of the dataset, for messages.
        sample (`str`): What was counted, where it was not everything (streams).
        rows (`int`): Rows counted. longest (`int`): Tokens of the longest row that is trained on.
        skipped (`Counter`): Rows per [`Skip`]. notes (`Counter`): Rows per [`Note`].
        first (`dict[str, int]`): Index of the first skipped row of each reason.
        details (`dict[str, str]`): What was wrong with that row.
        shown (`str`): Trained text of the first row, to see whether the mask is right.
        whole ([`Measured`]): Tokens of the rows that were measured. groups (`dict[str, Measured]`): The same, per
            `column=value`.
    """

    name: str
    sample: str = ""
    rows: int = 0
    longest: int = 0
    skipped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    shown: str = ""
    whole: Measured = field(default_factory=Measured)
    groups: dict[str, Measured] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Rows that are trained on."""
        return self.rows - self.skipped.total()

    def count(self, length: int, notes: Sequence[str]) -> None:
        """One more row: its tokens, 0 if it is skipped, and its notes (the reason if it is skipped)."""
        if length == 0:
            self.first.setdefault(notes[0], self.rows)
        (self.notes if length else self.skipped).update(notes)
        self.longest = max(self.longest, length)
        self.rows += 1

    def measure(self, ids: Sequence[int], labels: Sequence[int], sayable: np.ndarray, groups: Iterable[str]) -> None:
        """
        Tokens of one row.

        Args:
            sayable (`np.ndarray` of shape `(V,)`): True for target tokens that the draft can say.
            groups (`Iterable[str]`): `column=value` of the row.
        """
        ids, trained = np.asarray(ids), np.asarray(labels) != IGNORED
        trained[:2] = False  # no feature stands before them, see `supervised_targets`
        counts = (len(ids), int(trained.sum()), int(sayable[ids[trained]].sum()))
        self.whole.add(*counts)
        for group in groups:
            if group not in self.groups and len(self.groups) >= MAX_GROUPS:
                group = OTHERS
            self.groups.setdefault(group, Measured()).add(*counts)

    def check(self) -> None:
        """
        Refuse a dataset without a usable row, or one that was made with another tokenizer.

        Raises:
            ValueError: Names the reasons, their counts, an example of each, and what to do.
        """
        of = f"of `{self.name}`" + (f" ({self.sample})" if self.sample else "")
        if self.kept == 0:
            raise ValueError(f"All {self.rows} rows {of} had to be skipped, so nothing would train: {self.reasons()}")
        broken = self.skipped[Skip.VOCABULARY] + self.skipped[Skip.UNEQUAL]
        if 2 * broken > self.rows:
            raise ValueError(
                f"{broken} of {self.rows} rows {of} do not fit the target, too many to skip: {self.reasons()}"
            )

    def reasons(self) -> str:
        """Every reason with its count, an example and what to do; for errors and warnings."""
        parts = []
        for reason, count in self.skipped.most_common():
            example = f" (row {self.first[reason]}: {self.details[reason]})" if reason in self.details else ""
            parts.append(f"{reason}: {count}{example}. {ADVICE.get(reason, '')}".strip())
        return " ".join(parts)

    def warnings(self) -> list[str]:
        """What a user should know before a long run; empty if all is well."""
        found = []
        if self.skipped:
            found.append(f"{self.skipped.total()} of {self.rows} rows of `{self.name}` are skipped. {self.reasons()}")
        lost, added = self.notes[Note.REASONING_LOST], self.notes[Note.REASONING_ADDED]
        if lost or added:
            found.append(
                f"The chat template drops the reasoning of {lost} rows of `{self.name}` and adds a reasoning block to "
                f"{added}, so a draft would learn text that the target does not write. Train on the ids that the target "
                "generated (`input_ids` and `labels`), or set `enable_thinking` in a `chat_template_kwargs` column."
            )
        if self.whole.supervised and self.whole.coverage < LOW_COVERAGE:
            low = [f"{name} {m.coverage:.1%}" for name, m in self.groups.items() if m.coverage < LOW_COVERAGE]
            found.append(
                f"The draft's vocabulary holds only {self.whole.coverage:.1%} of the supervised tokens of `{self.name}`"
                f"{' (' + ', '.join(low) + ')' if low else ''}; it can never propose the others. Make a draft with a larger "
                "`draft_vocab_size`, or with `token_counts` of this data; a published draft keeps its vocabulary."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "dataset": self.name,
            "counted": self.sample or "all rows",
            "rows": self.rows,
            "rows_trained": self.kept,
            "skipped": dict(self.skipped.most_common()),
            "examples": {reason: {"row": self.first[reason], "found": text} for reason, text in self.details.items()},
            "notes": dict(self.notes.most_common()),
            "longest_row": self.longest,
            "first_trained_text": self.shown,
            "measured": self.whole.to_dict(),
            "groups": {name: measured.to_dict() for name, measured in sorted(self.groups.items())},
        }

    def __str__(self) -> str:
        counted = f" ({self.sample})" if self.sample else ""
        lines = [
            f"{self.name}{counted}: {self.rows:,} rows, {self.kept:,} trained on, longest {self.longest:,} tokens"
        ]
        lines += [f"  skipped: {count:,} {reason}" for reason, count in self.skipped.most_common()]
        lines += [f"  {count:,} {note}" for note, count in self.notes.most_common()]
        looked = "" if self.whole.rows == self.kept else f" ({self.whole.rows:,} rows looked at)"
        lines.append(
            f"  supervised: {self.whole.share:.1%} of the tokens, of which the draft can say {self.whole.coverage:.1%}{looked}"
        )
        lines += [f"  {name}: {m.share:.1%}, {m.coverage:.1%}" for name, m in sorted(self.groups.items())]
        if self.shown:
            lines.append(f"  trained text of the first row: {textwrap.shorten(self.shown, SHOWN)!r}")
        return "\n".join(lines)
