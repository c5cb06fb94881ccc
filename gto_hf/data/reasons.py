# SPDX-License-Identifier: Apache-2.0
"""Why a row of training data is skipped, and what is worth knowing about one that is kept. Level 4."""

from __future__ import annotations

from enum import StrEnum


class Skip(StrEnum):
    """Why a row cannot be trained on. The value is what reports say."""

    EMPTY = "empty conversation"
    UNKNOWN_ROLE = "unknown role"
    NO_ANSWER = "no assistant turn"
    NO_CONTENT = "missing content"
    NOT_TEXT = "content is not text"
    TEMPLATE = "refused by the chat template"
    REWRITTEN = "answers rewritten by the chat template"
    UNFINISHED = "a cut answer whose end cannot be told from the template's"
    VOCABULARY = "token id outside the vocabulary"
    UNEQUAL = "labels of another length"
    MASKED = "nothing marked for training"
    TOO_LONG = "longer than max_length before the first trained token"
    PACKED = "several documents in one row"
    TOO_SHORT = "too short to have a trainable token"


class Note(StrEnum):
    """What happened to a row that is trained on. The value is what reports say."""

    CUT = "cut at max_length"
    UNFINISHED = "cut answer (`finished` false) trained without an end of turn"
    LEADING = "leading assistant turn left out"
    TURNS = "some answers not trained: the chat template rewrites them"
    REASONING_LOST = "reasoning dropped by the chat template"
    REASONING_ADDED = "reasoning block added by the chat template"


ADVICE = {
    Skip.UNKNOWN_ROLE: "Roles are user (human), assistant (gpt, bot, chatgpt, model), system, developer and tool.",
    Skip.NO_CONTENT: "A row needs `messages`, `conversations`, `prompt` and `completion`, `text`, or `input_ids`.",
    Skip.REWRITTEN: "Give the ids that the target generated (`input_ids` and `labels`), or set `enable_thinking` in a "
    "`chat_template_kwargs` column; `assistant_only_loss=False` trains the text as the template writes it.",
    Skip.UNFINISHED: "Raise `max_new_tokens` where the answers are written, or use a server that gives token ids.",
    Skip.VOCABULARY: "Tokenise with the target's tokenizer.",
    Skip.UNEQUAL: "Give one label (or mask value) per token.",
    Skip.MASKED: "Check that the labels, the mask, or the chat template's generation markers mark the answers.",
    Skip.TOO_LONG: "Raise `max_length`.",
}


class RowError(ValueError):
    """
    A row that cannot be trained on.

    Args:
        reason ([`Skip`]): What it is counted as.
        detail (`str`): What was found in this row.
    """

    def __init__(self, reason: Skip, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
