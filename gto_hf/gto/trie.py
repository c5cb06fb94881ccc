# SPDX-License-Identifier: Apache-2.0
"""
Many trees of a sequence as one trie hung on it: what they share is one node, and what is the text itself is none. Level 4.

A node's target probability depends on its token path alone. The trees of a draft and its reference overlap, a branch that
follows the text below one root occurs below the next roots, and nodes on the text were forwarded with it. Slow twin: the
per-tree forwards in `tests/reference/naive_gto.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gto_hf.tree import DraftTree


@dataclass(frozen=True)
class Trie:
    """
    Ids `0 .. B * T - 1` are the slots of the sequences, row by row; unique nodes off the text follow.

    Attributes:
        slots (`int`): `B * T`.
        ids (`list[torch.LongTensor]`): For each batch of trees, `(R, N + 1)`: id of every node; column 0 is the root's slot.
        parents (`torch.LongTensor` of shape `(M,)`): Id of each node's parent, which is smaller than its own.
        tokens (`torch.LongTensor` of shape `(M,)`): Of each node.
        anchors (`torch.LongTensor` of shape `(M,)`): Slot id below which the node hangs.
        offsets (`torch.LongTensor` of shape `(M,)`): Tokens below that slot, at least 1.
        tops (`torch.LongTensor` of shape `(M,)`): Number of the node's first ancestor off the text; nodes with different
            ones see nothing of each other.
    """

    slots: int
    ids: list[torch.Tensor]
    parents: torch.Tensor
    tokens: torch.Tensor
    anchors: torch.Tensor
    offsets: torch.Tensor
    tops: torch.Tensor


def build_trie(
    trees: list[DraftTree],
    roots: torch.Tensor,
    keep: torch.Tensor,
    input_ids: torch.Tensor,
    on_text: torch.Tensor,
    vocab_size: int,
) -> Trie:
    """
    Merge trees.

    Args:
        trees (`list[DraftTree]`): Each of `B * n` rows, sequence-major, on the same roots.
        roots (`torch.LongTensor` of shape `(B, n)`): Slot of each root.
        keep (`torch.BoolTensor` of shape `(B * n,)`): Trees that count; of the others every node gets the root's id.
        input_ids (`torch.LongTensor` of shape `(B, T)`): The sequences.
        on_text (`torch.BoolTensor` of shape `(B, T)`): Slots that may stand for a node, because their logits are known.
        vocab_size (`int`): Of the target.
    """
    batch, length = input_ids.shape
    slots, device = batch * length, input_ids.device
    start = (torch.arange(batch, device=device)[:, None] * length + roots).flatten()
    text, usable = input_ids.flatten(), on_text.flatten()
    last_of_row = torch.arange(slots, device=device) % length == length - 1
    ids = [start[:, None].expand(-1, tree.tokens.shape[1]).clone() for tree in trees]
    keys = start.new_empty(0)  # sorted `parent * vocab_size + token`
    numbers = start.new_empty(0)  # their ids
    parents: list[torch.Tensor] = []
    total = 0
    for depth in range(1, max(tree.max_depth for tree in trees) + 1):
        where = [((tree.depths == depth) & keep[:, None]).nonzero(as_tuple=True) for tree in trees]
        parent = torch.cat(
            [own[row, tree.parents[row, col]] for own, tree, (row, col) in zip(ids, trees, where, strict=True)]
        )
        token = torch.cat([tree.tokens[row, col] for tree, (row, col) in zip(trees, where, strict=True)])
        slot = parent.clamp(max=slots - 1)
        following = (slot + 1).clamp(max=slots - 1)
        follows = (parent < slots) & ~last_of_row[slot] & usable[following] & (text[following] == token)
        key = parent * vocab_size + token
        fresh, inverse = key[~follows].unique(return_inverse=True)
        place = torch.searchsorted(keys, fresh).clamp(max=max(len(keys) - 1, 0))
        known = keys[place] == fresh if len(keys) else torch.zeros_like(fresh, dtype=torch.bool)
        number = slots + total + (~known).cumsum(0) - 1
        if len(keys):
            number = torch.where(known, numbers[place], number)
        found = following.clone()
        found[~follows] = number[inverse]
        offset = 0
        for own, (row, col) in zip(ids, where, strict=True):
            own[row, col] = found[offset : offset + len(row)]
            offset += len(row)
        new = fresh[~known]
        parents.append(new)
        total += len(new)
        keys, order = torch.cat([keys, new]).sort()
        numbers = torch.cat([numbers, number[~known]])[order]
    made = torch.cat(parents)
    parent, token = made // vocab_size, made % vocab_size
    return Trie(slots, ids, parent, token, *_below(parent, slots))


def _below(parent: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Anchor, offset and top of every node, by following parents to the text."""
    own = torch.arange(len(parent), device=parent.device)
    anchors, offsets, tops = parent.clone(), torch.ones_like(parent), own.clone()
    while bool((anchors >= slots).any()):
        off = anchors >= slots
        tops = torch.where(off, anchors - slots, tops)
        offsets = offsets + off
        anchors = torch.where(off, parent[(anchors - slots).clamp(min=0)], anchors)
    return anchors, offsets, tops


def chunks(trie: Trie, batch: int, max_nodes: int, some: torch.Tensor | None = None) -> list[torch.Tensor]:
    """
    Nodes in groups that one forward can take: `(B, S)` node numbers, -1 for padding, whole tops in one group.

    Args:
        batch (`int`): Sequences. max_nodes (`int`): Nodes per sequence and group, unless one top has more.
        some (`torch.BoolTensor` of shape `(M,)`, *optional*): Nodes that are wanted, with all nodes above them; default all.
    """
    length = trie.slots // batch
    row = trie.anchors // length
    order = (row * (len(row) + 1) + trie.tops).argsort(stable=True)
    if some is not None:
        order = order[some[order]]
    row, tops = row[order], trie.tops[order]
    per_row: list[list[torch.Tensor]] = []
    for b in range(batch):
        mine, top = order[row == b], tops[row == b]
        sizes = top.unique_consecutive(return_counts=True)[1].tolist()
        groups, begin, size = [], 0, 0
        for count in sizes:
            if size and size + count > max_nodes:
                groups.append(mine[begin : begin + size])
                begin, size = begin + size, 0
            size += count
        if size:
            groups.append(mine[begin : begin + size])
        per_row.append(groups)
    made = []
    for index in range(max((len(groups) for groups in per_row), default=0)):
        parts = [groups[index] if index < len(groups) else order[:0] for groups in per_row]
        made.append(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1))
    return made
