# SPDX-License-Identifier: Apache-2.0
"""
Random numbers that belong to nodes of a trie. Level 4.

A node's number follows from its row's seed, its place in the text and the tokens below that, and from nothing else: equal
nodes of different trees, batches, ranks or forwards get equal numbers.
"""

from __future__ import annotations

import torch

from .sequences import Sequences
from .trie import Trie


# Odd constants of the splitmix64 generator (Steele, Lea, Flood 2014), as signed 64-bit numbers: products wrap around.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Bits of int64 numbers, well mixed."""
    value = value + _GAMMA
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value = (value ^ _shifted(value, shift)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted to the right as if unsigned."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def node_draws(trie: Trie, seeds: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """
    One number in [0, 1) for each id of a trie, `(slots + M,)` float64 on the CPU.

    Args:
        trie ([`Trie`]): Of `B` sequences.
        seeds (`torch.LongTensor` of shape `(B,)`): One per sequence.
        sequences ([`Sequences`]): Their positions tell the places of a text apart, wherever its padding stands.
    """
    text = _mix(seeds.cpu()[:, None] + _mix(sequences.position_ids.cpu())).flatten()
    parents, offsets = trie.parents.cpu(), trie.offsets.cpu()
    tokens = _mix(trie.tokens.cpu())
    found = torch.cat([text, torch.zeros_like(parents)])
    for level in range(1, int(offsets.max()) + 1 if len(offsets) else 1):
        here = (offsets == level).nonzero()[:, 0]
        found[trie.slots + here] = _mix(found[parents[here]] + tokens[here])
    return _shifted(found, 11).double() / 2**53


def drawn_tokens(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """
    Tokens `(n,)` drawn from `softmax(scores)` by inverting its distribution function, on the CPU.

    Args:
        scores (`torch.FloatTensor` of shape `(n, V)`): Logits.
        draws (`torch.DoubleTensor` of shape `(n,)`): In [0, 1); see [`node_draws`].
    """
    below = scores.cpu().double().softmax(-1).cumsum(-1)
    # The first token with more than the drawn share below it and at it, so one of probability 0 is never taken.
    return torch.searchsorted(below, (draws * below[:, -1])[:, None], right=True)[:, 0]
