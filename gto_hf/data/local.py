# SPDX-License-Identifier: Apache-2.0
"""Answers of a target in this process: stock `generate`, in batches of like length (level 4)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from gto_hf.target import text_config

from .dialogue import Dialogue, Reply
from .prompts import Conversation, Message, Skipped
from .rows import render_prompt


WINDOW = 8  # batches that are sorted together


class LocalTarget:
    """
    A target that answers [`Dialogue`]s.

    Args:
        target (`PreTrainedModel`): Writes with stock `generate`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        fields (`dict`): Fields of a `GenerationConfig`, `max_new_tokens` among them; see [`check_generation`].
        template_kwargs (`dict`, *optional*): For the chat template, for example `{"enable_thinking": False}`.
    """

    def __init__(
        self, target: Any, tokenizer: Any, fields: dict[str, Any], template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.target, self.tokenizer, self.fields = target, tokenizer, fields
        self.template_kwargs = template_kwargs or {}
        self._room = getattr(text_config(target), "max_position_embeddings", None)
        ends = fields.get("eos_token_id", getattr(target.generation_config, "eos_token_id", None))
        ends = tokenizer.eos_token_id if ends is None else ends
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        # Not an end token, so that padding cannot pass for an end that was not written.
        candidates = [tokenizer.pad_token_id, *range(text_config(target).vocab_size)]
        self._pad = next(i for i in candidates if i is not None and i not in self._ends)

    def prompt(self, conversation: Conversation, messages: Sequence[Message]) -> list[int]:
        """
        Token ids that the target reads before it answers.

        Raises:
            ValueError: If the chat template refuses the messages or the answer might not fit behind them.
        """
        try:
            ids = render_prompt(self.tokenizer, list(messages), tools=conversation.tools, **self.template_kwargs)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses it: {error}") from error
        longest = self.fields["max_new_tokens"]
        if self._room is not None and len(ids) + longest > self._room:
            raise ValueError(f"no room for max_new_tokens={longest} within the target's {self._room} positions")
        return ids

    def plan(
        self, conversations: Sequence[Conversation], batch_size: int, skipped: Skipped
    ) -> list[list[Conversation]]:
        """Batches of conversations of like length, in a fixed order; those that cannot be answered go to `skipped`."""
        sized = []
        for found in conversations:
            try:
                sized.append((len(found.asks), len(self.prompt(found, found.asks[0])), found))
            except ValueError as error:
                skipped.add(str(error), f"id {found.id}")
        window = WINDOW * batch_size
        batches = []
        for start in range(0, len(sized), window):
            near = sorted(sized[start : start + window], key=lambda each: each[:2], reverse=True)
            batches += [[each[2] for each in near[i : i + batch_size]] for i in range(0, len(near), batch_size)]
        return batches

    def answer(self, dialogues: Sequence[Dialogue]) -> None:
        """Write every turn of a batch of conversations; draws from torch's global generators."""
        while open_ones := [each for each in dialogues if not each.done]:
            asked = []
            for each in open_ones:
                try:
                    asked.append((each, self.prompt(each.conversation, each.messages)))
                except ValueError:  # the first turn was checked by `plan`
                    each.stop()
            if asked:
                for (each, prompt), new in zip(asked, self._generate([ids for _, ids in asked]), strict=True):
                    each.add(self._reply(prompt, new))

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """The new tokens of each prompt, end token included."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(p)) + p for p in prompts], device=self.target.device)
        lengths = torch.tensor([len(p) for p in prompts], device=ids.device)
        mask = (torch.arange(width, device=ids.device) >= width - lengths[:, None]).long()
        stops = {"tokenizer": self.tokenizer} if "stop_strings" in self.fields else {}
        fields = {**self.fields, "pad_token_id": self._pad, "eos_token_id": sorted(self._ends) or None, **stops}
        return [self._cut(new) for new in self.target.generate(ids, attention_mask=mask, **fields)[:, width:].tolist()]

    def _cut(self, new: list[int]) -> list[int]:
        """One row without what `generate` padded it with."""
        end = next((i for i, token in enumerate(new) if token in self._ends), None)
        if end is not None:
            return new[: end + 1]
        while "stop_strings" in self.fields and len(new) > 1 and new[-1] == self._pad:
            new = new[:-1]
        return new

    def _reply(self, prompt: list[int], new: list[int]) -> Reply:
        finished = new[-1] in self._ends or len(new) < self.fields["max_new_tokens"]
        message = {"content": self.tokenizer.decode(new, skip_special_tokens=True)}
        if finished and getattr(self.tokenizer, "response_template", None) is not None:
            # Thoughts and calls of tools, which the chat template shows to later turns in its own way.
            with suppress(ValueError, KeyError):  # an answer may break its own format
                message = {**message, "content": "", **self.tokenizer.parse_response(new, prefix=prompt)}
        return Reply({**message, "role": "assistant"}, finished, len(new), prompt, new)
