# SPDX-License-Identifier: Apache-2.0
"""Answers of a target behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, TGI and others (level 4)."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from typing import Any

from .dialogue import Dialogue, Reply


# What a request calls the fields of a `GenerationConfig`. The second line is no part of OpenAI's interface, but of that of
# vLLM and SGLang at least.
FIELDS = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "stop_strings": "stop",
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty", "min_new_tokens": "min_tokens",
}  # fmt: skip
ABOUT_ONE_ROW = (400, 413, 422)
WORTH_A_RETRY = (408, 409, 425, 429)
LONGEST_PAUSE = 30.0


class RowRefused(ValueError):
    """The server does not take this conversation (its message says why); others may be fine."""


class ServerTarget:
    """
    A target that answers [`Dialogue`]s through `/chat/completions`. Usable from many threads.

    Args:
        url (`str`): Up to and with the version, `http://host:port/v1`.
        fields (`dict`): Fields of a `GenerationConfig`, `max_new_tokens` among them.
        model (`str`, *optional*): Name on the server. Not needed if it serves one.
        key (`str`, *optional*): Sent as bearer token.
        template_kwargs (`dict`, *optional*): For the chat template, for example `{"enable_thinking": False}`.
        seed (`int`, *optional*, defaults to `0`): Every turn of every answer gets its own seed that follows from it.
        timeout (`float`, *optional*, defaults to `600.0`): Seconds to wait for one answer.
        retries (`int`, *optional*, defaults to `8`): Attempts after the first, for what may pass: 408, 409, 425, 429, 5xx,
            lost connections, timeouts, unreadable replies.
        pause (`float`, *optional*, defaults to `0.5`): Seconds before the first retry; doubles up to 30. A `Retry-After` of
            the server counts instead.

    Attributes:
        gives_ids (`bool`): Whether replies hold the token ids that were read and generated; known after [`connect`].

    Raises:
        ValueError: If a field cannot be sent.
    """

    def __init__(
        self,
        url: str,
        fields: dict[str, Any],
        *,
        model: str | None = None,
        key: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        retries: int = 8,
        pause: float = 0.5,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`--server {url}` must be an address such as http://localhost:8000/v1.")
        self.url, self.model, self._seed = url.rstrip("/"), model, seed
        self._timeout, self._retries, self._pause = timeout, retries, pause
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._body = request_fields(fields)
        if template_kwargs:
            self._body["chat_template_kwargs"] = template_kwargs
        self.gives_ids = False
        self.stopped = threading.Event()  # set it to end the waiting between attempts

    def connect(self) -> None:
        """
        Find the model and ask for one token, so that what is wrong shows before long work.

        Raises:
            ValueError: If there is no such server or model, or it refuses the request.
        """
        if self.model is None:
            served = [each.get("id") for each in self._send("/models", None, retries=2)["data"]]
            if len(served) != 1:
                raise ValueError(f"{self.url} serves {served or 'no model that it names'}; choose one with `--model`.")
            self.model = served[0]
        probe = {**self._body, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        probe.pop("min_tokens", None)
        self.gives_ids = True
        try:
            reply = self._ask(probe, retries=2)
        except RowRefused as with_ids:
            self.gives_ids = False  # strict servers refuse a field they do not know
            try:
                reply = self._ask(probe, retries=2)
            except RowRefused:
                raise ValueError(f"{self.url} refuses requests with these settings: {with_ids}") from with_ids
        self.gives_ids = reply.ids is not None

    def answer(self, dialogue: Dialogue) -> Dialogue:
        """
        Write every turn of one conversation.

        Raises:
            RowRefused: If the server does not take its first turn.
            ValueError: If the server refuses for a reason that is not this conversation's, or stays unreachable.
        """
        while not dialogue.done:
            text = f"{self._seed} {dialogue.key} {dialogue.turn}"
            body = {
                **self._body,
                "messages": dialogue.messages,
                "seed": int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1,
            }
            if dialogue.conversation.tools:
                body["tools"] = dialogue.conversation.tools
            try:
                dialogue.add(self._ask(body))
            except RowRefused:
                if not dialogue.rows:
                    raise
                dialogue.stop()
        return dialogue

    def _ask(self, body: dict[str, Any], retries: int | None = None) -> Reply:
        body = {**body, "model": self.model, **({"return_token_ids": True} if self.gives_ids else {})}
        reply = self._send("/chat/completions", body, retries=retries)
        choice = reply["choices"][0]
        said = choice["message"]
        message = {"role": "assistant", "content": said.get("content") or ""}
        thought = said.get("reasoning_content") or said.get("reasoning")
        if thought:
            message["reasoning_content"] = thought
        if said.get("tool_calls"):
            message["tool_calls"] = said["tool_calls"]
        finished = choice.get("finish_reason") != "length"
        tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        if not self.gives_ids:
            return Reply(message, finished, tokens)
        ids = choice.get("token_ids")
        prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")  # SGLang's place, vLLM's place
        if not ids or not prompt_ids:  # a file has them in all rows or in none
            raise RowRefused("a reply without the token ids that were asked for")
        return Reply(message, finished, len(ids), prompt_ids, ids)

    def _send(self, path: str, body: dict[str, Any] | None, retries: int | None = None) -> dict[str, Any]:
        """One request with its retries; the reply as JSON."""
        retries = self._retries if retries is None else retries
        data = None if body is None else json.dumps(body, default=str).encode()
        for attempt in range(retries + 1):
            pause = min(self._pause * 2**attempt, LONGEST_PAUSE)
            try:
                request = urllib.request.Request(self.url + path, data, self._headers)
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    reply = json.loads(response.read())
                if isinstance(reply["data"] if body is None else reply["choices"][0]["message"], (dict, list)):
                    return reply
                failure = f"a reply that cannot be read: {json.dumps(reply)[:200]}"
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code}: {_explanation(error)}"
                if error.code in ABOUT_ONE_ROW:
                    raise RowRefused(failure) from None
                if error.code < 500 and error.code not in WORTH_A_RETRY:
                    raise ValueError(f"{self.url}{path} answers {failure}") from None
                after = error.headers.get("Retry-After", "")
                pause = min(float(after), LONGEST_PAUSE) if after.isdigit() else pause
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                failure = f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError) as error:
                failure = f"a reply that cannot be read ({type(error).__name__}: {error})"
            if attempt < retries and self.stopped.wait(pause):
                break
        raise ValueError(
            f"{self.url}{path} failed {attempt + 1} times, last with {failure}. What was answered is in the output; run "
            "the same command again to go on."
        )


def request_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """
    Fields of a `GenerationConfig` as fields of a request.

    Raises:
        ValueError: Names fields that no server takes.
    """
    # The server knows the model's own.
    fields = {k: v for k, v in fields.items() if k not in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0.0
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"A server is not told {', '.join(unknown)}; it takes {', '.join(FIELDS)} and do_sample.")
    return {FIELDS[name]: value for name, value in fields.items()}


def _explanation(error: urllib.error.HTTPError) -> str:
    """What the server says, in at most 300 characters."""
    try:
        text = error.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except ValueError:
        pass
    return (text or str(error.reason))[:300]
