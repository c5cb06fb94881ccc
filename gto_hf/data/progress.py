# SPDX-License-Identifier: Apache-2.0
"""A progress bar over answered conversations, and what this run wrote (level 4)."""

from __future__ import annotations

from collections.abc import Iterable

from tqdm.auto import tqdm

from .dialogue import Dialogue


class Progress:
    """
    Counts while it shows.

    Args:
        total (`int`): Conversations of the whole file.
        done (`int`): Of them, those in the file already.

    Attributes:
        conversations, rows, tokens, cut (`int`): Written by this run; `cut` are conversations that a length limit ended.
    """

    def __init__(self, total: int, done: int) -> None:
        self.conversations = self.rows = self.tokens = self.cut = 0
        self._bar = tqdm(total=total, initial=done, desc="answers", unit="answer")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, dialogues: Iterable[Dialogue]) -> None:
        """Count conversations that are in the file now."""
        for each in dialogues:
            self.conversations += 1
            self.rows += len(each.rows)
            self.tokens += each.tokens
            self.cut += not each.rows[-1]["finished"]
            self._bar.update()
        seconds = self._bar.format_dict["elapsed"]
        self._bar.set_postfix_str(f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s")

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations answered in {self.rows} rows, {self.tokens} tokens; {self.cut} cut by "
            "the length limit"
        )
