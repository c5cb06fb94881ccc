# SPDX-License-Identifier: Apache-2.0
"""
Which tokens of a rendered conversation an assistant wrote. Level 4.

Templates with `{% generation %}` say so themselves. For all others the conversation is rendered up to each answer and up
to its end, and the token ids are compared with those of the whole: what stands between the two is the answer. An answer
that the whole conversation renders differently (templates that drop earlier `<think>` blocks) is not what the target
wrote after that prompt, so it is not trained.
"""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from .conversations import answer_of, reasoning_of
from .reasons import Note, RowError, Skip


Messages = list[dict[str, Any]]


def render(tokenizer: Any, messages: Messages, **kwargs: Any) -> Any:
    """
    A conversation as the chat template writes it: its text, or with `tokenize=True` a dictionary with `input_ids`.

    Args:
        **kwargs: Passed to `apply_chat_template`.

    Raises:
        RowError: If the template cannot render this conversation.
        ValueError: If the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "The rows are conversations, but the tokenizer has no chat template. Set `tokenizer.chat_template` (or "
            "`chat_template_path`), or give `prompt` and `completion` as text."
        )
    try:
        return tokenizer.apply_chat_template(messages, **{"tokenize": False, "return_dict": True, **kwargs})
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise RowError(Skip.TEMPLATE, f"{type(error).__name__}: {str(error)[:200]}") from error


def render_ids(tokenizer: Any, messages: Messages, **kwargs: Any) -> list[int]:
    """Token ids of a conversation; see [`render`]."""
    return render(tokenizer, messages, tokenize=True, **kwargs)["input_ids"]


def spelled_for_template(tokenizer: Any, messages: Messages, **kwargs: Any) -> tuple[Messages, str]:
    """
    The messages as this template reads them, and their text without white space.

    Most templates read content as text. Those of image models read a list of parts; given text, some of them write an
    empty turn.

    Raises:
        RowError: If the text of an answer is missing either way, or the template refuses both.
    """
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    failed = None
    for spelled in (messages, parts):
        try:
            text = squeezed(render(tokenizer, spelled, **kwargs))
        except RowError as error:
            failed = failed or error
            continue
        lost = [i for i, m in enumerate(messages) if m["role"] == "assistant" and squeezed(answer_of(m)) not in text]
        if not lost:
            return spelled, text
        failed = failed or RowError(Skip.TEMPLATE, f"it leaves out the text of turn {lost[0]}")
    raise failed


def assistant_tokens(
    tokenizer: Any, messages: Messages, *, first: int = 0, train_on: str = "all", **kwargs: Any
) -> tuple[list[int], list[int], list[Note]]:
    """
    Token ids of a conversation and which of them to train.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's, with a chat template.
        messages (`list[dict]`): As [`read_messages`] gives them.
        first (`int`, *optional*, defaults to `0`): Turns before this one are not trained (a prompt).
        train_on (`str`, *optional*, defaults to `"all"`): All assistant turns, or the `"last"` one.
        **kwargs: Passed to `apply_chat_template` (`tools`, `enable_thinking`, ..).

    Returns:
        `input_ids` and `mask` of the same length, 1 where an assistant wrote the token (its end-of-turn token included);
        and what is worth counting.

    Raises:
        RowError: No assistant turn, a conversation that the template refuses, or rewrites in every turn to be trained.
    """
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not turns:
        raise RowError(Skip.NO_ANSWER, f"the roles are {[message['role'] for message in messages]}")
    spelled, text = spelled_for_template(tokenizer, messages, **kwargs)
    if has_generation_markers(tokenizer, kwargs.get("tools")):
        ids, mask = _marked(tokenizer, spelled, first, **kwargs)
        if train_on == "last":
            mask = _last_run(mask)
            turns = turns[-1:]
        notes = []
    else:
        turns = turns[-1:] if train_on == "last" else turns
        answers = {turn: answer_of(messages[turn]) for turn in turns}
        ids, mask, rewritten = _by_prefixes(tokenizer, spelled, answers, **kwargs)
        notes = [Note.TURNS] if rewritten else []
        turns = [i for i in turns if i not in rewritten]
    reasoning = [part for part in (reasoning_of(messages[turn]) for turn in turns) if part]
    if any(squeezed(part) not in text for part in reasoning):
        notes.append(Note.REASONING_LOST)
    elif not reasoning and "</think>" in _decode(tokenizer, [i for i, bit in zip(ids, mask, strict=True) if bit]):
        notes.append(Note.REASONING_ADDED)
    return ids, mask, notes


def unfinished_length(tokenizer: Any, messages: Messages, ids: list[int], **kwargs: Any) -> int:
    """
    How many of a conversation's `ids` come before the end of turn that the template writes after its last answer.

    The end is what two conversations have in common that differ in nothing but that answer.

    Raises:
        RowError: If the answer was cut in its reasoning, whose end the template would write as well.
    """
    last = messages[-1]
    if reasoning_of(last) and not answer_of(last).strip() and not last.get("tool_calls"):
        raise RowError(Skip.UNFINISHED, "it was cut in its reasoning")
    pair = []
    for answer in ("A", "B"):
        spelled, _ = spelled_for_template(
            tokenizer, [*messages[:-1], {"role": "assistant", "content": answer}], **kwargs
        )
        pair.append(render_ids(tokenizer, spelled, **kwargs)[::-1])
    end = len(commonprefix(pair))
    if ids[len(ids) - end :] != pair[0][:end][::-1]:
        raise RowError(Skip.UNFINISHED, "the chat template ends it in another way than a plain answer")
    return len(ids) - end


def has_generation_markers(tokenizer: Any, tools: Any = None) -> bool:
    """Whether the template that would be used marks assistant text with `{% generation %}`, and it can be located."""
    template = tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template is not None else ""
    return tokenizer.is_fast and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _marked(tokenizer: Any, messages: Messages, first: int, **kwargs: Any) -> tuple[list[int], list[int]]:
    """Ids and mask of a template with markers; tokens of the first `first` turns are masked out."""
    whole = render(tokenizer, messages, tokenize=True, return_assistant_tokens_mask=True, **kwargs)
    ids, mask = whole["input_ids"], list(whole["assistant_masks"])
    if first:
        prompt = render_ids(tokenizer, messages[:first], add_generation_prompt=True, **kwargs)
        start = len(commonprefix([prompt, ids]))
        mask[:start] = [0] * start
    if not any(mask):
        raise RowError(Skip.MASKED, "the chat template's generation markers mark no token of this conversation")
    return ids, mask


def _last_run(mask: list[int]) -> list[int]:
    """Only the last unbroken run of ones: the last answer, since a role header stands between any two."""
    end = len(mask) - mask[::-1].index(1)
    start = end - (mask[:end][::-1] + [0]).index(0)
    return [int(start <= i < end) for i in range(len(mask))]


def _by_prefixes(
    tokenizer: Any, messages: Messages, answers: dict[int, str], **kwargs: Any
) -> tuple[list[int], list[int], list[int]]:
    """Ids, mask, and which of the turns with these answers the whole conversation renders differently than alone."""
    ids = render_ids(tokenizer, messages, **kwargs)
    mask, rewritten = [0] * len(ids), []
    for turn, answer in answers.items():
        prompt = render_ids(tokenizer, messages[:turn], add_generation_prompt=True, **kwargs)
        until = ids if turn == len(messages) - 1 else render_ids(tokenizer, messages[: turn + 1], **kwargs)
        start, end = len(prompt), len(commonprefix([until, ids]))
        whole = end == len(until) or _contains(tokenizer, ids[start:end], answer)
        if ids[:start] == prompt and start < end and whole:
            mask[start:end] = [1] * (end - start)
        else:
            rewritten.append(turn)
    if not any(mask):
        raise RowError(
            Skip.REWRITTEN, f"in context, turns {rewritten} have other tokens than right after their own prompt"
        )
    return ids, mask, rewritten


def _contains(tokenizer: Any, ids: list[int], answer: str) -> bool:
    """
    Whether the tokens hold all of an answer.

    Some templates end every text with a token of its own (Phi-3), so a prefix ends otherwise than the same turn does in
    the whole conversation. The answer itself is the same then.
    """
    return bool(answer) and squeezed(answer) in squeezed(_decode(tokenizer, ids))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def squeezed(text: str) -> str:
    """Without white space, which templates trim."""
    return "".join(text.split())
