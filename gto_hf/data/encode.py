# SPDX-License-Identifier: Apache-2.0
"""One row of any format to token ids and labels, or the reason why not. Level 4."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from .conversations import read_messages, without_leading_answers
from .masks import assistant_tokens, render_ids, spelled_for_template, unfinished_length
from .reasons import Note, RowError, Skip


NOTES = "gto_notes"
MASKS = ("assistant_masks", "completion_mask", "loss_mask")
IGNORED = -100

Encoded = tuple[list[int], list[int], list[Note]]


@dataclass(frozen=True)
class RowEncoder:
    """
    Turns rows of a dataset into `input_ids` and `labels` (-100 where not trained).

    The first format that a row has (not None) is read: `input_ids` with `labels`, or with `assistant_masks`,
    `completion_mask` or `loss_mask`; `prompt` and `completion`, both text or both messages; `messages`; `conversations`
    (ShareGPT, or `role` / `content`); text. `tools` and `chat_template_kwargs` go to the chat template. A row with
    `finished` false ends with the text of its last answer, without an end of turn that the target did not write.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        vocab_size (`int`): Of the target.
        max_length (`int`, *optional*): Longer rows are cut. keep_end (`bool`): Keep their end instead of their start.
        text_field (`str`, *optional*, defaults to `"text"`): Column of plain text.
        train_on (`str`, *optional*, defaults to `"all"`): Assistant turns to train in conversations: `"all"` or `"last"`.
        assistant_only (`bool`, *optional*): False trains every token of a conversation. True refuses rows that are no
            conversation. None trains assistant turns of conversations, and takes other rows as well.
        completion_only (`bool`, *optional*): False trains prompts as well, and ignores `completion_mask`.
        formatting_func (`Callable`, *optional*): Makes text of a row that has no `input_ids`.
    """

    tokenizer: Any
    vocab_size: int
    max_length: int | None = None
    keep_end: bool = False
    text_field: str = "text"
    train_on: str = "all"
    assistant_only: bool | None = None
    completion_only: bool | None = None
    formatting_func: Callable[[dict[str, Any]], str] | None = None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list]:
        """`input_ids`, `labels` and notes; a row that cannot be trained on has no ids, and its reason as only note."""
        try:
            ids, labels, notes = self.encode(row)
        except RowError as error:
            return {"input_ids": [], "labels": [], NOTES: [error.reason.value]}
        return {"input_ids": ids, "labels": labels, NOTES: [note.value for note in notes]}

    def encode(self, row: Mapping[str, Any]) -> Encoded:
        """
        Ids, labels and notes of one row.

        Raises:
            RowError: If it cannot be trained on.
        """
        ids, labels, notes = self._read(row)
        self._check_ids(ids, labels)
        whole = labels
        if self.max_length is not None and len(ids) > self.max_length:
            kept = slice(-self.max_length, None) if self.keep_end else slice(self.max_length)
            ids, labels, notes = ids[kept], labels[kept], [*notes, Note.CUT]
        if not trainable(labels):
            raise RowError(*self._why_untrainable(whole))
        return ids, labels, notes

    def tokens(self, row: Mapping[str, Any]) -> list[int]:
        """
        All ids of one row, whether or not any is trained.

        Raises:
            RowError: If it cannot be read.
        """
        ids, labels, _ = self._read(row)
        self._check_ids(ids, labels)
        return ids

    def _why_untrainable(self, labels: list[int]) -> tuple[Skip, str]:
        if trainable(labels):
            return Skip.TOO_LONG, f"{len(labels)} tokens, cut at `max_length={self.max_length}`"
        if any(label != IGNORED for label in labels):
            return (
                Skip.TOO_SHORT,
                f"of its {len(labels)} tokens only the first two are trained, which no draft predicts",
            )
        return Skip.MASKED, f"none of its {len(labels)} tokens is marked"

    def _check_ids(self, ids: list[int], labels: list[int]) -> None:
        if not ids:
            raise RowError(Skip.TOO_SHORT, "it has no tokens")
        if len(labels) != len(ids):
            raise RowError(Skip.UNEQUAL, f"{len(labels)} labels for {len(ids)} tokens")
        wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i < self.vocab_size]
        if wrong:
            raise RowError(Skip.VOCABULARY, f"token id {wrong[0]}, but the target has {self.vocab_size} tokens")

    def _read(self, row: Mapping[str, Any]) -> Encoded:
        """Whole row, not yet cut or checked."""
        has = {name for name in row if row[name] is not None}
        if "input_ids" in has:
            return self._given(row, has)
        if self.formatting_func is not None:
            return self._text(self.formatting_func(row), row)
        if {"prompt", "completion"} <= has:
            return self._prompt_and_completion(row)
        for name in ("messages", "conversations"):
            if name in has:
                return self._conversation(row, read_messages(row[name]))
        if self.text_field in has:
            return self._text(row[self.text_field], row)
        raise RowError(Skip.NO_CONTENT, f"the row has only {sorted(has)}")

    def _given(self, row: Mapping[str, Any], has: set[str]) -> Encoded:
        """Ids as they are: what the target generated is never rendered again."""
        ids = _plain(row["input_ids"])
        if _packed(row):
            raise RowError(Skip.PACKED, "a tree must not see another document; split it at `seq_lengths`")
        if "labels" in has:
            return ids, _plain(row["labels"]), []
        if self.completion_only is False:
            has = has - {"completion_mask"}
        masks = [_plain(row[name]) for name in MASKS if name in has]
        if any(len(mask) != len(ids) for mask in masks):
            raise RowError(Skip.UNEQUAL, f"masks of lengths {[len(mask) for mask in masks]} for {len(ids)} tokens")
        if self.assistant_only and not masks:
            raise RowError(Skip.MASKED, "`assistant_only_loss=True` needs `labels` or a mask beside `input_ids`")
        return ids, _labels(ids, [all(bits) for bits in zip(*masks, strict=True)] if masks else [1] * len(ids)), []

    def _text(self, text: Any, row: Mapping[str, Any]) -> Encoded:
        """Plain text, every token trained; ends with the end-of-sequence token."""
        self._refuse_text()
        ids = self.tokenizer(self._ended(text, row))["input_ids"]
        return ids, list(ids), self._cut(row)

    def _cut(self, row: Mapping[str, Any]) -> list[Note]:
        return [Note.UNFINISHED] if _unfinished(row) else []

    def _ended(self, text: Any, row: Mapping[str, Any]) -> str:
        if not isinstance(text, str):
            raise RowError(Skip.NOT_TEXT, f"expected text, found {type(text).__name__}")
        if not text.strip():
            raise RowError(Skip.NO_CONTENT, "the text is empty")
        end = self.tokenizer.eos_token or ""
        return text if _unfinished(row) or text.endswith(end) else text + end

    def _refuse_text(self) -> None:
        if self.assistant_only:
            raise RowError(Skip.NO_ANSWER, "`assistant_only_loss=True` needs conversations; the row is plain text")

    def _prompt_and_completion(self, row: Mapping[str, Any]) -> Encoded:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            self._refuse_text()
            before = self.tokenizer(prompt)["input_ids"]
            answer = self._ended(completion, row)
            ids = self.tokenizer(prompt + answer)["input_ids"]
            # Tokens may merge across the boundary, so the completion starts where the two part.
            start = 0 if self.completion_only is False else len(commonprefix([before, ids]))
            return ids, _labels(ids, [0] * start + [1] * (len(ids) - start)), self._cut(row)
        asked, answered = read_messages(prompt), read_messages(completion)
        return self._conversation(row, asked + answered, len(asked))

    def _conversation(self, row: Mapping[str, Any], messages: list[dict[str, Any]], prompt: int = 0) -> Encoded:
        """Messages, of which the first `prompt` are a prompt (0: a whole conversation)."""
        kwargs = {"tools": _tools(row.get("tools")), **_present(row.get("chat_template_kwargs"))}
        notes = []
        if not prompt and self.assistant_only is not False:
            given, messages = len(messages), without_leading_answers(messages)
            notes = [Note.LEADING] * (len(messages) < given)
            if not messages:
                raise RowError(Skip.NO_ANSWER, "no assistant turn follows a user turn")
        ids, labels, found = self._whole_conversation(messages, prompt, kwargs)
        if _unfinished(row) and messages[-1]["role"] == "assistant":
            end = unfinished_length(self.tokenizer, messages, ids, **kwargs)
            ids, labels, found = ids[:end], labels[:end], [*found, Note.UNFINISHED]
        return ids, labels, notes + found

    def _whole_conversation(self, messages: list[dict[str, Any]], prompt: int, kwargs: dict[str, Any]) -> Encoded:
        """A conversation with all that the template writes; arguments as of [`_conversation`]."""
        first = 0 if self.completion_only is False else prompt
        if self.assistant_only is not False:
            ids, mask, found = assistant_tokens(
                self.tokenizer, messages, first=first, train_on=self.train_on, **kwargs
            )
            return ids, _labels(ids, mask), found
        messages, _ = spelled_for_template(self.tokenizer, messages, **kwargs)
        ids = render_ids(self.tokenizer, messages, **kwargs)
        before = []
        if first:
            before = render_ids(self.tokenizer, messages[:first], add_generation_prompt=True, **kwargs)
        start = len(commonprefix([before, ids]))
        return ids, _labels(ids, [0] * start + [1] * (len(ids) - start)), []


def _unfinished(row: Mapping[str, Any]) -> bool:
    """Whether a length limit cut the row's answer: the target did not write the end that a template adds."""
    value = row.get("finished")
    value = value.item() if hasattr(value, "item") else value  # of numpy and torch
    return isinstance(value, bool) and not value


def _packed(row: Mapping[str, Any]) -> bool:
    """Whether `seq_lengths` (TRL's packing) or `position_ids` that start again say that documents follow one another."""
    lengths, positions = row.get("seq_lengths"), row.get("position_ids")
    if lengths is not None and len(_plain(lengths)) > 1:
        return True
    steps = [] if positions is None else _plain(positions)
    return all(isinstance(step, int) for step in steps) and any(
        after <= before for before, after in zip(steps, steps[1:], strict=False)
    )


def trainable(labels: list[int]) -> bool:
    """Whether a draft can be trained on any token; before the first two there is no feature to predict from."""
    return any(label != IGNORED for label in labels[2:])


def _labels(ids: list[int], mask: Sequence[int]) -> list[int]:
    return [token if bit else IGNORED for token, bit in zip(ids, mask, strict=True)]


def _plain(values: Any) -> list:
    """A list, also of what a dataset in torch or numpy format gives."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _present(kwargs: Any) -> dict[str, Any]:
    """Without what is None because another row of the dataset has it."""
    return {key: value for key, value in (kwargs or {}).items() if value is not None}


def _tools(tools: Any) -> Any:
    """Tools as a list; datasets store them as JSON text as well."""
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) if tools.strip() else None
    except json.JSONDecodeError as error:
        raise RowError(Skip.TEMPLATE, f"`tools` is not JSON: {error}") from error
