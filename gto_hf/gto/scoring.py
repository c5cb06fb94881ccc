# SPDX-License-Identifier: Apache-2.0
"""
What the target says at every node of many trees of a sequence, from few forwards. Level 4.

The trees are merged into one trie (see `trie.py`). Its nodes hang on the sequence's own KV cache: a node sees the sequence up
to its anchor and its own ancestors. The cache is cropped back after each forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gto_hf.target import backend_mask
from gto_hf.tree import DraftTree

from .sequences import Sequences
from .trie import Trie, build_trie, chunks


@dataclass(frozen=True)
class TreeScores:
    """
    The target's view of `R` trees.

    Attributes:
        node_log_probs (`torch.FloatTensor` of shape `(R, N + 1)`): Log-probability (nats) of each node's token after
            its parent's path; -inf below an end-of-sequence token. Column 0 is 0.
        choices (`torch.LongTensor` of shape `(R, N + 1)`): The target's next token after each node (argmax or sample);
            -1 at end-of-sequence nodes.
    """

    node_log_probs: torch.Tensor
    choices: torch.Tensor


@torch.no_grad()
def score_trees(
    target: Any,
    cache: Any,
    trees: list[DraftTree],
    roots: torch.Tensor,
    sequences: Sequences,
    logits: torch.Tensor,
    first: int,
    eos_ids: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    temperature: float = 1.0,
    sample: torch.Generator | None = None,
    max_nodes: int = 1024,
    largest: Callable[[int], int] = int,
) -> tuple[list[TreeScores], int]:
    """
    Score several batches of `n` trees for each of `B` sequences, all on the same roots.

    Equal nodes are one node, so equal trees get equal bits.

    Args:
        target (`PreTrainedModel`): Frozen causal LM.
        cache (`DynamicCache`): Keys and values of the whole sequences; unchanged on return.
        trees (`list[DraftTree]`): Each of `B * n` rows, sequence-major.
        roots (`torch.LongTensor` of shape `(B, n)`): Slot of each root in its sequence.
        sequences ([`Sequences`]): As they were forwarded.
        logits (`torch.FloatTensor` of shape `(B, S, V)`): The target's logits at slots `first ..`, all roots among them.
        first (`int`): Slot of the first of them.
        eos_ids (`torch.LongTensor` of shape `(E,)`): Nothing below these is accepted.
        keep (`torch.BoolTensor` of shape `(B * n,)`, *optional*): Trees to score; the others get zeros.
        temperature (`float`, *optional*, defaults to `1.0`): Of the target's distribution.
        sample (`torch.Generator`, *optional*): Draw `choices` instead of taking the most likely token; once per node.
        max_nodes (`int`, *optional*, defaults to `1024`): Nodes per sequence and forward (at least one whole branch).
        largest (`Callable`, *optional*): The largest of a number over all ranks that must forward the target equally often,
            because it is split over them. By default every rank stands alone.

    Returns:
        One [`TreeScores`] per batch of trees, and the number of nodes forwarded through the target.
    """
    ids, device = sequences.input_ids, sequences.input_ids.device
    batch, length = ids.shape
    keep = torch.ones(roots.numel(), dtype=torch.bool, device=device) if keep is None else keep
    slot = torch.arange(length, device=device)
    known = sequences.valid & (slot >= first) & (slot < first + logits.shape[1])
    trie = build_trie(trees, roots, keep, ids, known, logits.shape[-1])
    count = len(trie.parents)
    log_probs = torch.zeros(trie.slots + count, dtype=torch.float32, device=device)
    choices = torch.full((trie.slots + count,), -1, dtype=torch.long, device=device)
    _read_text(trie, ids, logits, first, log_probs, choices, temperature, sample)
    groups = chunks(trie, batch, max_nodes)
    idle = largest(len(groups)) - len(groups)
    for group in groups:
        _forward(target, cache, trie, sequences, group, log_probs, choices, temperature, sample)
    for _ in range(idle):
        target(input_ids=ids[:, :1], use_cache=False)
    return [
        _of_trees(tree, own, log_probs, choices, eos_ids, keep) for tree, own in zip(trees, trie.ids, strict=True)
    ], count


def _of_trees(
    tree: DraftTree,
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    choices: torch.Tensor,
    eos_ids: torch.Tensor,
    keep: torch.Tensor,
) -> TreeScores:
    """Values of a trie's ids back to the nodes of trees."""
    ended = torch.isin(tree.tokens, eos_ids)
    values = log_probs[ids].masked_fill_(ended.gather(1, tree.parents), -torch.inf)
    values[:, 0] = 0
    return TreeScores(
        node_log_probs=values.masked_fill_(~keep[:, None], 0), choices=choices[ids].masked_fill_(ended, -1)
    )


def _read_text(
    trie: Trie,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    first: int,
    log_probs: torch.Tensor,
    choices: torch.Tensor,
    temperature: float,
    sample: torch.Generator | None,
) -> None:
    """Choices at the slots that roots and nodes stand on, and log-probabilities of what hangs below them."""
    batch, length = input_ids.shape
    used = torch.zeros(trie.slots, dtype=torch.bool, device=input_ids.device)
    for ids in trie.ids:
        used[ids[ids < trie.slots]] = True
    slots = used.nonzero()[:, 0]
    row, column = slots // length, (slots % length - first).clamp(0, logits.shape[1] - 1)
    numbers = torch.full_like(used, -1, dtype=torch.long)
    numbers[slots] = torch.arange(len(slots), device=slots.device)
    # Below each used slot: the next token of the text, unless the row ends, and nodes.
    inside = slots[slots % length < length - 1]
    hanging = (trie.parents < trie.slots).nonzero()[:, 0]
    below = torch.cat([inside + 1, trie.slots + hanging])
    tokens = torch.cat([input_ids.flatten(), trie.tokens])[below]
    parent = torch.cat([inside, trie.parents[hanging]])
    values, chosen = _read(logits, row, column, numbers[parent], tokens, temperature, sample)
    choices[slots] = chosen
    log_probs[below] = values


# Rows of logits turned to float32 at a time: bounds the copy.
_ROWS = 128


def _read(
    logits: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    parent: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    sample: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities `(C,)` of `tokens` after nodes number `parent`, and the choice `(n,)` after each node.

    Args:
        logits (`(B, S, V)`); row, column (`(n,)`): Where each node's logits stand.
    """
    chosen, normaliser = [], []
    for start in range(0, len(row), _ROWS):
        some = slice(start, start + _ROWS)
        scores = logits[row[some], column[some]].float() / temperature
        normaliser.append(scores.logsumexp(-1))
        if sample is None:
            chosen.append(scores.argmax(-1))
        else:
            drawn = torch.multinomial(scores.softmax(-1).cpu(), 1, generator=sample)
            chosen.append(drawn[:, 0].to(row.device))
    values = logits[row[parent], column[parent], tokens].float() / temperature - torch.cat(normaliser)[parent]
    return values, torch.cat(chosen)


def _forward(
    target: Any,
    cache: Any,
    trie: Trie,
    sequences: Sequences,
    group: torch.Tensor,
    log_probs: torch.Tensor,
    choices: torch.Tensor,
    temperature: float,
    sample: torch.Generator | None,
) -> None:
    """One target forward over a group of nodes `(B, S)`, -1 for padding; writes what they say."""
    batch, length = sequences.input_ids.shape
    size, device = group.shape[1], group.device
    real, node = group >= 0, group.clamp(min=0)
    # Column of each node's parent in the group; a node whose parent is on the text, and padding, is its own.
    column = torch.full((len(trie.parents) + 1,), -1, dtype=torch.long, device=device)
    here = torch.arange(size, device=device).expand(batch, -1)
    column[group[real]] = here[real]
    parent_node = trie.parents[node] - trie.slots
    parent = torch.where(real & (parent_node >= 0), column[parent_node.clamp(min=0)], here)
    to_nodes = torch.zeros(batch, size, size, dtype=torch.bool, device=device)
    ancestor = here
    for _ in range(int(trie.offsets.max())):
        to_nodes.scatter_(2, ancestor[..., None], True)
        ancestor = parent.gather(1, ancestor)
    anchor = (trie.anchors[node] % length).masked_fill(~real, 0)
    slots = torch.arange(length, device=device)
    to_sequence = sequences.valid[:, None] & (slots <= anchor[..., None])
    positions = sequences.position_ids.gather(1, anchor) + trie.offsets[node]
    keys = torch.cat([sequences.position_ids, positions], dim=-1)
    mask = torch.cat([to_sequence, to_nodes], dim=-1)
    # The target's own dtype, as when it read the sequences: mixed precision is the draft's.
    with torch.autocast(device.type, enabled=False):
        output = target(
            input_ids=trie.tokens[node],
            position_ids=positions,
            attention_mask=backend_mask(target, mask, target.dtype, positions, keys),
            cache=cache,
            use_cache=True,
        )
    cache.crop(-size)
    row, col = real.nonzero(as_tuple=True)
    numbers = torch.full((batch, size), -1, dtype=torch.long, device=device)
    numbers[real] = torch.arange(len(row), device=device)
    inner = real & (parent_node >= 0)
    number_of_parent = numbers.gather(1, parent)[inner]
    values, chosen = _read(output.logits, row, col, number_of_parent, trie.tokens[node][inner], temperature, sample)
    choices[trie.slots + group[real]] = chosen
    log_probs[trie.slots + group[inner]] = values
