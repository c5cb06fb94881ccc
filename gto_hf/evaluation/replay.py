# SPDX-License-Identifier: Apache-2.0
"""
What a draft would have saved on texts that exist already, without decoding them again. Level 5.

Decoding with a draft writes the target's own text, and a round depends on nothing but the text before it. So, given that text, the
tree of every round can be grown from a single pass and compared with what follows. For greedy text of the target this is the very
acceptance length that decoding has; for sampled text it is that of a call that drew this text. It costs a few draft
forwards per answer, and drafts and trees can be compared on equal texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gto_hf.decoding import DecodingStatistics
from gto_hf.drafts import DraftModel
from gto_hf.gto import SequencePrefix, Sequences, read_target
from gto_hf.tree import DraftTree, TreeConfig


# Trees of a text that are grown at a time: their logits are the largest tensors here.
_ROOTS = 128


@dataclass(frozen=True)
class Text:
    """
    A text that a target wrote.

    Attributes:
        tokens (`list[int]`): Prompt and answer.
        prompt (`int`): Tokens of the prompt, at least 1.
    """

    tokens: list[int]
    prompt: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.tokens):
            raise ValueError(
                f"A text needs a prompt and an answer, got {self.prompt} prompt tokens of {len(self.tokens)}."
            )


@dataclass(frozen=True)
class Replay:
    """
    One text with one draft.

    Attributes:
        statistics ([`DecodingStatistics`]): As of decoding the text.
        accepted (`list[int]`): Drafted tokens accepted by a round that starts at the first, second, .. answer token: every
            round that could have been, so their mean varies less than that of the rounds that were.
    """

    statistics: DecodingStatistics
    accepted: list[int]


@torch.no_grad()
def read_texts(target: Any, draft: DraftModel, texts: list[Text]) -> list[Sequences]:
    """One pass of the target over each text; the result serves every draft that reads the same feature layers."""
    found = []
    for text in texts:
        ids = torch.tensor([text.tokens], device=target.device)
        layers = list(draft.config.feature_layers)
        found.append(read_target(target, ids, torch.ones_like(ids), layers, 0, 1, use_cache=False).sequences)
    return found


@torch.no_grad()
def replay(
    draft: DraftModel,
    texts: list[Text],
    sequences: list[Sequences],
    tree: TreeConfig | None = None,
) -> list[Replay]:
    """
    Acceptance of a draft on texts.

    Args:
        draft ([`DraftModel`]): Attached to the target that wrote them.
        texts (`list[Text]`): Texts.
        sequences (`list[Sequences]`): From [`read_texts`].
        tree ([`TreeConfig`], *optional*): Defaults to the draft's, taken as fixed.
    """
    tree = draft.tree if tree is None else tree
    results = []
    for text, read in zip(texts, sequences, strict=True):
        # The last token is written by a round, it never starts one.
        roots = torch.arange(text.prompt, len(text.tokens) - 1, device=read.input_ids.device)[None]
        if roots.shape[1] == 0:
            results.append(Replay(DecodingStatistics(runs=1, emitted_tokens=1, target_forwards=1), []))
            continue
        prefix, accepted = SequencePrefix(draft, read), []
        for some in roots.split(_ROOTS, dim=1):
            accepted += accepted_lengths(prefix.grow(some, tree), read.input_ids[0], some[0]).tolist()
        results.append(Replay(_rounds(accepted, tree.total_tokens), accepted))
    return results


def accepted_lengths(trees: DraftTree, tokens: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """`(R,)` int64: how far the text `tokens` `(T,)` can be followed down each tree, whose root stands at slot `roots` `(R,)`."""
    slot = roots[:, None] + trees.depths + 1
    following = tokens[slot.clamp(max=len(tokens) - 1)].masked_fill(slot >= len(tokens), -1)
    return trees.accepted(following).sum(1) - 1


def _rounds(accepted: list[int], drafted: int) -> DecodingStatistics:
    """The rounds that decoding would have made, from what each possible round accepts."""
    statistics, at = DecodingStatistics(), 0
    statistics.start(1)
    while at < len(accepted):
        kept = accepted[at]
        # What is behind the end of the text was not emitted: the last round may have no bonus token.
        bonus = at + kept < len(accepted)
        statistics.add_rounds([(kept, bonus)], drafted)
        at += kept + 1
    return statistics
