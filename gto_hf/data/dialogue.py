# SPDX-License-Identifier: Apache-2.0
"""One conversation while it is answered, and the rows that it becomes (level 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .prompts import Conversation, Message


@dataclass(frozen=True)
class Reply:
    """
    One answer of the target.

    Attributes:
        message (`dict`): The assistant message that later turns see.
        finished (`bool`): False if a length limit cut it.
        tokens (`int`): How many tokens were generated.
        prompt_ids, ids (`list[int]`, *optional*): What the target read and what it generated, its end token included.
            None if a server does not tell.
    """

    message: Message
    finished: bool
    tokens: int
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None


class Dialogue:
    """
    Answers one conversation turn by turn and collects rows that the trainer takes as they are.

    A row holds the turns whose tokens follow each other: the next turn joins it if what the target read then begins with
    what was read and generated before. Where the template shows an earlier answer otherwise (thinking left out, text that
    re-tokenises), the next turn begins a row of its own. So every labelled token is one that the target generated, after
    the very tokens that it read. Without ids the rows hold messages, under the same rule as far as text can tell.

    Args:
        conversation ([`Conversation`]): What is asked.
        answer (`int`): Number of this sample, from 0.
    """

    def __init__(self, conversation: Conversation, answer: int) -> None:
        self.conversation, self.answer = conversation, answer
        self.messages: list[Message] = list(conversation.asks[0])
        self.rows: list[dict[str, Any]] = []
        self.tokens = 0
        self._turn = 0

    @property
    def key(self) -> tuple[str, int]:
        """`(id, answer)`: what makes the rows of this conversation unlike all others."""
        return self.conversation.id, self.answer

    @property
    def turn(self) -> int:
        """Number of the answer that is to be written next, from 0."""
        return self._turn

    @property
    def done(self) -> bool:
        """Whether the last row is complete."""
        return bool(self.rows) and self.rows[-1]["last"]

    def add(self, reply: Reply) -> None:
        """
        Take the answer of one turn. A conversation ends with its last turn, with a cut answer and with a call of a tool:
        what would follow was not said after that.
        """
        before = self.rows[-1] if self.rows else None
        if before is not None and _continues(before, reply):
            self.rows.pop()
        else:
            before = None
        self.messages.append(reply.message)
        self.tokens += reply.tokens
        ends = self._turn + 1 == len(self.conversation.asks) or not reply.finished or "tool_calls" in reply.message
        row = {
            "id": self.conversation.id,
            "answer": self.answer,
            "turn": self._turn,
            "last": ends,
            "finished": reply.finished,
            **self.conversation.extra,
            "messages": list(self.messages),
        }
        if reply.ids is not None:
            labels = [] if before is None else before["labels"]
            row["input_ids"] = reply.prompt_ids + reply.ids
            row["labels"] = labels + [-100] * (len(reply.prompt_ids) - len(labels)) + reply.ids
        self.rows.append(row)
        self._turn += 1
        if not ends:
            self.messages.extend(self.conversation.asks[self._turn])

    def stop(self) -> None:
        """End before the next turn, for which there is no room."""
        self.rows[-1]["last"] = True


def _continues(row: dict[str, Any], reply: Reply) -> bool:
    """Whether the next reply came after the very tokens (or, without ids, the very text) of this row."""
    if reply.ids is None:
        said = row["messages"][-1]
        return not said.get("reasoning_content") and "</think>" not in (said.get("content") or "")
    return reply.prompt_ids[: len(row["input_ids"])] == row["input_ids"]
