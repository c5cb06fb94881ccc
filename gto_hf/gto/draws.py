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

    A node that repeats the text has the text's number, whether or not the trie let it stand on the text: that depends on which
    logits of the text are at hand, and so on the other rows of a batch.

    Args:
        trie ([`Trie`]): Of `B` sequences.
        seeds (`torch.LongTensor` of shape `(B,)`): One per sequence.
        sequences ([`Sequences`]): Their positions tell the places of a text apart, wherever its padding stands.
    """
    length = sequences.input_ids.shape[1]
    text, valid = sequences.input_ids.cpu().flatten(), sequences.valid.cpu().flatten()
    parents, offsets, tokens = trie.parents.cpu(), trie.offsets.cpu(), trie.tokens.cpu()
    found = _mix(seeds.cpu()[:, None] + _mix(sequences.position_ids.cpu())).flatten()
    found = torch.cat([found, torch.zeros_like(parents)])
    slot = torch.cat([torch.arange(trie.slots), torch.full_like(parents, -1)])  # of the text that a node repeats
    for level in range(1, int(offsets.max()) + 1 if len(offsets) else 1):
        here = (offsets == level).nonzero()[:, 0]
        above, token = parents[here], tokens[here]
        following = (slot[above] + 1).clamp(max=trie.slots - 1)
        inside = (slot[above] >= 0) & (slot[above] % length < length - 1)  # the row goes on
        repeats = inside & valid[following] & (text[following] == token)
        slot[trie.slots + here] = torch.where(repeats, following, -1)
        found[trie.slots + here] = torch.where(repeats, found[following], _mix(found[above] + _mix(token)))
    return _shifted(found, 11).double() / 2**53


def drawn_tokens(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """
    Tokens `(n,)` drawn from `softmax(scores)` by inverting its distribution function.

    Args:
        scores (`torch.FloatTensor` of shape `(n, V)`): Logits.
        draws (`torch.DoubleTensor` of shape `(n,)`): In [0, 1), on the CPU; see [`node_draws`].
    """
    device = torch.device("cpu") if scores.device.type == "mps" else scores.device  # MPS has no float64
    below = scores.to(device).double().softmax(-1).cumsum(-1)
    # The first token with more than the drawn share below it and at it, so one of probability 0 is never taken.
    return torch.searchsorted(below, (draws.to(device) * below[:, -1])[:, None], right=True)[:, 0].to(scores.device)
