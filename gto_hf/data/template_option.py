# SPDX-License-Identifier: Apache-2.0
"""`--chat-template-kwargs`, which several commands have. Level 4."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--chat-template-kwargs", type=json.loads, default=None, help='JSON, for example {"enable_thinking": false}'
    )


def template_kwargs(args: argparse.Namespace, tokenizer: Any = None) -> dict[str, Any]:
    """
    Variables for the chat template, `{}` if none are given.

    Raises:
        ValueError: If they are no JSON object, or `tokenizer` has no chat template that could read them.
    """
    given = args.chat_template_kwargs
    if given is not None and not isinstance(given, dict):
        raise ValueError("`--chat-template-kwargs` must be a JSON object.")
    if given and tokenizer is not None and tokenizer.chat_template is None:
        raise ValueError(
            "`--chat-template-kwargs`: the target's tokenizer has no chat template, so nothing would read them. Leave them out, or "
            "save a `chat_template.jinja` beside the tokenizer."
        )
    return given or {}
