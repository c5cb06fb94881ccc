# SPDX-License-Identifier: Apache-2.0
"""Whether two models speak of the same tokens, whatever rows pad their tables. Level 1."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from .describe import unwrap


def tokenizer_hash(tokenizer: Any) -> str:
    """
    A hash of what a tokenizer calls every id: its vocabulary with added and special tokens.

    Equal for equal numberings of tokens, however the tokenizer was loaded; chat templates and padding sides do not count.
    """
    entries = sorted((int(i), token) for token, i in tokenizer.get_vocab().items())
    text = json.dumps(entries, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tokenizer_rows(tokenizer: Any) -> int:
    """One more than the largest id that stands for a token; rows from there on are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def find_tokenizer(target: nn.Module) -> Any:
    """
    The tokenizer in the folder or the local cache that a target was loaded from; None if there is none.

    Nothing is downloaded.
    """
    config = unwrap(target).config
    if not config._name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(
            config._name_or_path,
            revision=getattr(config, "_commit_hash", None),
            local_files_only=True,
            trust_remote_code=False,  # else it would ask on the terminal
        )
    except (OSError, ValueError, KeyError, ImportError):  # the last: a package that this tokenizer needs
        return None
