# SPDX-License-Identifier: Apache-2.0
"""
A draft that knows what the target will write, except where it is told to be wrong; for decoding tests on random targets.

A trained draft knows only the texts it was trained on. This one accepts many tokens for any target without training,
and still meets wrong branches: at some positions the true token is only its second or third choice, at others it does
not propose it at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gto_hf import TreeConfig
from gto_hf.drafts import DraftConfig, DraftModel, DraftOutput
from gto_hf.drafts.attention import KeyValues
from gto_hf.target import fingerprint, text_config


TREE = TreeConfig(depth=4, top_k=3, total_tokens=12)
BEST = 10.0  # logit of the first choice; the rest lies below 3
ABSENT = -30.0


class OracleDraft(DraftModel):
    """
    Looks its logits up in a table by row and position; its features are these logits.

    It reads neither tokens nor target features, so wrong branches go on with the true text, too: a loop that accepted
    a child of a rejected node would be found out.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.zeros(1, 1, config.hidden_size), persistent=False)
        self.post_init()

    @classmethod
    def for_texts(
        cls,
        target: nn.Module,
        texts: torch.Tensor | Sequence[torch.Tensor],
        *,
        tree: TreeConfig = TREE,
        feature_layers: Sequence[int] = (1,),
        seed: int = 0,
        miss: float = 0.3,
    ) -> OracleDraft:
        """
        A draft for a batch of known texts.

        Args:
            target (`PreTrainedModel`): Whose texts they are.
            texts (`torch.LongTensor` of shape `(B, T)` or list of `(T_i,)`): One per row of the batch, prompt included,
                without padding, from position 0.
            tree ([`TreeConfig`]): Decoding tree.
            feature_layers (`Sequence[int]`): Layers of the target that decoding has to capture.
            seed (`int`): Of the misses and of the wrong tokens. A position is missed or not, whatever the other rows.
            miss (`float`): Share of the positions at which the true token is not the first choice. At half of these it
                is the second or third, at the other half the least likely token of all.
        """
        source = text_config(target)
        vocab = source.vocab_size
        width = vocab + vocab % 2
        config = DraftConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=2,
            target_hidden_size=source.hidden_size,
            own_embeddings=True,
            feature_layers=list(feature_layers),
            tree=tree.to_dict(),
            target=fingerprint(target),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        draft = cls(config)
        length = max(len(text) for text in texts)
        table = torch.full((len(texts), length, width), ABSENT)
        for row, text in enumerate(texts):
            table[row, :, :vocab] = _logits(torch.as_tensor(text).cpu(), length, vocab, seed, row, miss)
        draft.table = table
        return draft.to(target.device).eval().attach(target)

    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """Zeros `(rows, F, H)`, after a look at the width."""
        rows, count, width = target_features.shape
        expected = len(self.config.feature_layers) * self.config.target_hidden_size
        if width != expected:
            raise ValueError(f"Got target features of width {width}, expected {expected}.")
        return self.table.new_zeros(rows, count, self.config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[KeyValues] | None,
        past_mask: torch.Tensor,
        nodes: list[KeyValues] | None = None,
        node_mask: torch.Tensor | None = None,
    ) -> DraftOutput:
        """See [`DraftModel.forward`]. Rows share the texts out in order; a single row has the first text."""
        rows, count = input_ids.shape
        texts, length, _ = self.table.shape
        if rows != 1 and rows % texts:
            raise ValueError(f"Got {rows} rows for {texts} texts.")
        text = torch.arange(rows, device=self.table.device) * texts // rows
        output = self.table[text[:, None], position_ids.clamp(0, length - 1)]
        empty = self.table.new_zeros(rows, 1, count, self.config.head_dim)
        return DraftOutput(features=output, key_values=[(empty, empty)])

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """The features themselves, less the column that makes the width even."""
        return features[..., : self.config.draft_vocab_size]


def _logits(text: torch.Tensor, length: int, vocab: int, seed: int, row: int, miss: float) -> torch.Tensor:
    """Draft logits `(length, vocab)` of pairs `0..length - 1`; pair `j` proposes the token at `j + 2`."""
    pairs = torch.arange(length)
    noise = _uniform(seed, row, pairs[:, None], torch.arange(vocab))
    known = pairs + 2 < len(text)
    arbitrary = (noise[:, 0] * vocab).long()
    true = torch.where(known, text[(pairs + 2).clamp(max=len(text) - 1)], arbitrary)[:, None]
    # Two wrong tokens that stand above or right below the true one.
    wrong = noise.scatter(1, true, -1.0).topk(2, dim=1).indices
    kind = _uniform(seed, row, pairs, torch.tensor(vocab))[:, None]
    rank = torch.zeros(length, 1)
    rank[kind < miss] = 3.0
    rank[kind < miss / 2] = 2.0
    rank[kind < miss / 4] = 1.0
    own = torch.where(rank == 3, torch.tensor(ABSENT), BEST - rank)
    first = torch.where(rank == 0, 3 * noise.gather(1, wrong[:, :1]), torch.tensor(BEST))
    second = torch.where(rank == 2, torch.tensor(BEST - 1), 3 * noise.gather(1, wrong[:, 1:]))
    logits = 3 * noise
    for column, value in ((wrong[:, :1], first), (wrong[:, 1:], second), (true, own)):
        logits.scatter_(1, column, value)
    return logits


def _uniform(seed: int, row: int, *keys: Any) -> torch.Tensor:
    """Numbers in `[0, 1)` that depend on nothing but the keys (tensors that broadcast)."""
    # The offset gives the default seed right and wrong guesses among the first dozens of tokens of every row.
    state = torch.tensor((seed + 242) * 1_000_003 + row)
    for key in keys:
        state = (state * 0x5851F42D4C957F2D + key + 0x14057B7EF767814F) ^ (state >> 29)
        state = (state ^ ((state >> 32) & 0xFFFFFFFF)) * 0x2545F4914F6CDD1D
    return ((state >> 33) & 0xFFFFFF).float() / 2**24
