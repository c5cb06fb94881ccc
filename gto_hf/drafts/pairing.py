# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that are padded otherwise, and targets that say they are others. Level 2."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gto_hf.target import find_tokenizer, tokenizer_hash, tokenizer_rows

from .config import DraftConfig
from .vocab import vocab_buffers


if TYPE_CHECKING:
    from .base import DraftModel

_told: WeakKeyDictionary[nn.Module, set[tuple[str, Any]]] = WeakKeyDictionary()


def check_padding(config: DraftConfig, target: nn.Module, rows: int, tokenizer: Any, name: str) -> None:
    """
    Accept a target whose vocabulary has another number of rows if it has the draft's tokenizer: the rest is padding.

    Args:
        config ([`DraftConfig`]): Of the draft. target (`PreTrainedModel`): The target, with `rows` rows.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; looked for where the target was loaded from. For a
            draft that does not say which tokenizer it has, it must be given.
        name (`str`): Of the target, for messages.

    Raises:
        ValueError: Says both numbers of rows, and what is unknown or different.
    """
    sizes = f"This draft was made for a target vocabulary of {config.vocab_size}, but {name} has `vocab_size={rows}`."
    stored = (config.target or {}).get("tokenizer")
    if tokenizer is None and stored is not None:
        tokenizer = find_tokenizer(target)
    if tokenizer is None:
        raise ValueError(
            f"{sizes} A draft serves only the target it was trained for. If both have the same tokenizer and differ only in "
            "padding rows, pass it: `draft.attach(target, tokenizer=tokenizer)`."
        )
    if stored is not None and tokenizer_hash(tokenizer) != stored:
        raise ValueError(f"{sizes} Their tokenizers differ too, so the draft's ids mean other tokens there.")
    real = tokenizer_rows(tokenizer)
    if real > min(rows, config.vocab_size):
        raise ValueError(
            f"{sizes} The tokenizer has {real} tokens, so the smaller one lacks some that are no padding."
        )


@torch.no_grad()
def fit_vocabulary(draft: DraftModel, rows: int) -> None:
    """
    Give a draft the target's number of rows. New rows are padding that it never says; of rows that go, so do the head's.

    Args:
        draft ([`DraftModel`]): Changed, if it has another number. rows (`int`): Of the target, checked before.
    """
    config = draft.config
    if config.draft_type == "causal_lm" or rows == config.vocab_size:
        return
    stay = draft.kept_ids < rows
    kept = draft.kept_ids[stay]
    head = getattr(draft, "lm_head", None)
    if head is not None and len(kept) < config.draft_vocab_size:
        head.weight = nn.Parameter(head.weight[stay].clone(), requires_grad=head.weight.requires_grad)
        head.out_features = len(kept)
    if config.own_embeddings:
        old = draft.embed_tokens.weight
        new = old.new_zeros(rows, old.shape[1])
        new[: min(rows, len(old))] = old[:rows]
        draft.embed_tokens.weight = nn.Parameter(new, requires_grad=old.requires_grad)
        draft.embed_tokens.num_embeddings = rows
    config.vocab_size, config.draft_vocab_size = rows, len(kept)
    draft.d2t, draft.t2d = vocab_buffers(kept, rows)


def warn_other_target(draft: nn.Module, found: dict[str, Any]) -> None:
    """
    Warn, once for a draft and a difference, that a target of the right sizes is another model, revision or quantization, or
    has another tokenizer.

    Args:
        draft ([`DraftModel`]): The draft. found (`dict`): Fingerprint of the target, with `tokenizer` where it is known.
    """
    told, stored = _told.setdefault(draft, set()), dict(draft.config.target or {})
    if "quantization" in stored:  # to have none is a fact, while a name or a tokenizer may be unknown
        stored, found = ({**d, "quantization": d["quantization"] or "none"} for d in (stored, found))
    for field in ("name_or_path", "revision", "quantization"):
        expected = stored.get(field)
        if expected is None or found.get(field) in (None, expected) or (field, found[field]) in told:
            continue
        told.add((field, found[field]))
        warnings.warn(
            f"This draft was trained for `{field}={expected}` but decodes for `{found[field]}`: the text stays right, the "
            "acceptance length may suffer."
        )
    _warn_other_hash(draft, found.get("tokenizer"))


def warn_other_tokenizer(draft: nn.Module, tokenizer: Any) -> None:
    """Warn, once for a draft and a tokenizer, that a tokenizer of a vocabulary of the right size is another one."""
    _warn_other_hash(draft, tokenizer_hash(tokenizer))


def _warn_other_hash(draft: nn.Module, found: str | None) -> None:
    stored, told = (draft.config.target or {}).get("tokenizer"), _told.setdefault(draft, set())
    if stored is None or found in (None, stored) or ("tokenizer", found) in told:
        return
    told.add(("tokenizer", found))
    warnings.warn(
        "This draft was trained with another tokenizer: some ids stand for other tokens, or one of the two has more. The text "
        "stays right, the acceptance length may suffer."
    )
