# SPDX-License-Identifier: Apache-2.0
"""Conversations of every common spelling as `role` / `content` messages. Level 4, no tokenizer."""

from __future__ import annotations

from typing import Any

from .reasons import RowError, Skip


ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "bing", "bard"), "assistant"),
    **{role: role for role in ("system", "developer", "tool", "ipython", "function")},
}
# Names under which chat templates read the reasoning of an assistant turn.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def read_messages(turns: Any) -> list[dict[str, Any]]:
    """
    Messages with the roles that chat templates know, from `role` / `content` or ShareGPT's `from` / `value`.

    Args:
        turns (`list[dict]`): The turns. Content may be text or a list of text parts; other keys (`tool_calls`, ..) are kept.

    Raises:
        RowError: Empty, an unknown role, a turn without content, or content that is not text.
    """
    if not isinstance(turns, (list, tuple)):
        raise RowError(Skip.NOT_TEXT, f"expected a list of messages, found {type(turns).__name__}")
    if not turns:
        raise RowError(Skip.EMPTY, "the list of messages is empty")
    return [_read_message(turn, number) for number, turn in enumerate(turns)]


def _read_message(turn: Any, number: int) -> dict[str, Any]:
    """One turn; keys that hold None (columns of other rows) are left out."""
    if not isinstance(turn, dict):
        raise RowError(Skip.NOT_TEXT, f"turn {number} is a {type(turn).__name__}, expected a dictionary")
    turn = {key: value for key, value in turn.items() if value is not None}
    given = turn.pop("from", None)
    role = turn.pop("role", given)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise RowError(Skip.UNKNOWN_ROLE, f"turn {number} has the role {role!r}")
    value = turn.pop("value", "")
    content = _text(turn.pop("content", value), number)
    message = {"role": ROLES[role.lower()], "content": content, **turn}
    says_otherwise = message.get("tool_calls") or reasoning_of(message)
    if message["role"] in ("user", "assistant") and not content.strip() and not says_otherwise:
        raise RowError(Skip.NO_CONTENT, f"turn {number} ({message['role']}) is empty")
    return message


def _text(content: Any, number: int) -> str:
    """Content, given as text or as a list of text parts, as one string."""
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        kind = type(content).__name__
        raise RowError(Skip.NOT_TEXT, f"the content of turn {number} is a {kind}, expected text or text parts")
    return content


def without_leading_answers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The conversation without assistant turns that stand before the first user turn.

    ShareGPT dumps often begin in the middle of a chat. Such a turn answers nothing, and most templates refuse it.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [m for i, m in enumerate(messages) if i > first or m["role"] != "assistant"]


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning part of an assistant turn: a key of its own, or what `<think>` encloses in the content; else empty."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip()
    before, closed, _ = message["content"].partition("</think>")
    return before.split("<think>")[-1].strip() if closed else ""


def answer_of(message: dict[str, Any]) -> str:
    """The text of an assistant turn without its reasoning part."""
    return message["content"].rpartition("</think>")[2].strip()
