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

from gto_hf.target import LogitHead, backend_mask, boundary_features, text_config
from gto_hf.tree import DraftTree

from .draws import drawn_tokens, node_draws
from .reading import Readout
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
            -1 at leaves, where none is needed, and at end-of-sequence nodes.
    """

    node_log_probs: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True)
class NodeTeacher:
    """
    The target's distribution after nodes of a batch of trees.

    Attributes:
        index (`torch.LongTensor` of shape `(R, N + 1)`): Row of each node below; -1 for nodes that were not read.
        logits (`torch.FloatTensor` of shape `(n, Vd)`): Target logits of the draft's vocabulary, in the target's dtype.
        normaliser (`torch.FloatTensor` of shape `(n,)`): `logsumexp` of the logits of the whole vocabulary.
    """

    index: torch.Tensor
    logits: torch.Tensor
    normaliser: torch.Tensor


@torch.no_grad()
def score_trees(
    target: Any,
    cache: Any,
    trees: list[DraftTree],
    roots: torch.Tensor,
    sequences: Sequences,
    readout: Readout,
    eos_ids: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    known: list[TreeScores | None] | None = None,
    temperature: float = 1.0,
    sample: torch.Tensor | None = None,
    max_nodes: int = 1024,
    largest: Callable[[int], int] = int,
    teach: torch.Tensor | None = None,
) -> tuple[list[TreeScores], int, list[NodeTeacher]]:
    """
    Score several batches of `n` trees for each of `B` sequences, all on the same roots.

    Equal nodes are one node, so equal trees get equal bits. A node is forwarded only if something below it must be read from
    it: leaves are not, and neither is what `known` says already.

    Args:
        target (`PreTrainedModel`): Frozen causal LM.
        cache (`DynamicCache`): Keys and values of the whole sequences; unchanged on return.
        trees (`list[DraftTree]`): Each of `B * n` rows, sequence-major.
        roots (`torch.LongTensor` of shape `(B, n)`): Slot of each root in its sequence.
        sequences ([`Sequences`]): As they were forwarded.
        readout ([`Readout`]): The target's logits, with all roots among its slots.
        eos_ids (`torch.LongTensor` of shape `(E,)`): Nothing below these is accepted.
        keep (`torch.BoolTensor` of shape `(B * n,)`, *optional*): Trees to score; the others get zeros.
        known (`list[TreeScores | None]`, *optional*): For each batch of trees, scores that are known; they are returned
            as they are, and used for equal nodes of other trees.
        temperature (`float`, *optional*, defaults to `1.0`): Of the target's distribution.
        sample (`torch.LongTensor` of shape `(B,)`, *optional*): Draw `choices` with these seeds instead of taking the most
            likely token; once per node. See [`node_draws`].
        max_nodes (`int`, *optional*, defaults to `1024`): Nodes per sequence and forward (at least one whole branch).
        largest (`Callable`, *optional*): The largest of a number over all ranks that must forward the target equally often,
            because it is split over them. By default every rank stands alone.

        teach (`torch.LongTensor` of shape `(Vd,)`, *optional*): Target ids whose logits are kept at every node that is read.

    Returns:
        One [`TreeScores`] per batch of trees, the number of nodes forwarded through the target, and, with `teach`, one
        [`NodeTeacher`] per batch of trees.
    """
    ids, device = sequences.input_ids, sequences.input_ids.device
    batch, length = ids.shape
    keep = torch.ones(roots.numel(), dtype=torch.bool, device=device) if keep is None else keep
    known = [None] * len(trees) if known is None else known
    slot = torch.arange(length, device=device)
    on_text = sequences.valid & (slot >= readout.first) & (slot < readout.last)
    trie = build_trie(trees, roots, keep, ids, on_text, readout.vocab_size)
    values = _Values(trie, device, teach)
    draws = None if sample is None else node_draws(trie, sample, sequences)
    for tree, own, some in zip(trees, trie.ids, known, strict=True):
        if some is not None:
            values.learn(tree, own, some, keep)
    needed = _needed(trie, trees, known, values)
    _read_text(trie, ids, readout, values, temperature, draws)
    groups = chunks(trie, batch, max_nodes, needed)
    most = largest(len(groups))  # before the first forward: ranks may ask each other only where all of them do
    for group in groups:
        _forward(target, readout.head, cache, trie, sequences, group, values, temperature, draws)
    for _ in range(most - len(groups)):
        target(input_ids=ids[:, :1], use_cache=False)
    scores = [
        _of_trees(tree, own, values, eos_ids, keep) if some is None else some
        for tree, own, some in zip(trees, trie.ids, known, strict=True)
    ]
    return scores, int(needed.sum()), [values.teacher(own) for own in trie.ids] if teach is not None else []


class _Values:
    """Log-probability of each id's token and the target's choice after it; what was known first stays."""

    def __init__(self, trie: Trie, device: torch.device, teach: torch.Tensor | None) -> None:
        size = trie.slots + len(trie.parents)
        self.log_probs = torch.zeros(size, dtype=torch.float32, device=device)
        self.choices = torch.full((size,), -1, dtype=torch.long, device=device)
        self.has_log_prob = torch.zeros(size, dtype=torch.bool, device=device)
        self.has_choice = torch.zeros_like(self.has_log_prob)
        self.taught = teach
        self.row = torch.full((size,), -1, dtype=torch.long, device=device)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = 0

    def teach(self, ids: torch.Tensor, scores: torch.Tensor, normaliser: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep what the target says after `ids` `(n,)`: `scores` `(n, V)`."""
        if self.taught is not None:
            self.row[ids] = torch.arange(self.rows, self.rows + len(ids), device=ids.device)
            self.kept.append((scores[:, self.taught].to(dtype), normaliser))
            self.rows += len(ids)

    def teacher(self, ids: torch.Tensor) -> NodeTeacher:
        """For trees with node `ids` `(R, N + 1)`."""
        logits, normaliser = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        return NodeTeacher(self.row[ids], logits, normaliser)

    def learn(self, tree: DraftTree, ids: torch.Tensor, known: TreeScores, keep: torch.Tensor) -> None:
        """Scores of trees with node `ids` `(R, N + 1)` that were known before; of those that `keep` `(R,)`."""
        inner = ~tree.leaves() & keep[:, None]  # the choice after a leaf was never read
        self.write_choices(ids[inner], known.choices[inner])
        self.write_log_probs(ids[keep, 1:].flatten(), known.node_log_probs[keep, 1:].flatten())

    def write_log_probs(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write what is not there yet."""
        new = ~self.has_log_prob[ids]
        self.log_probs[ids[new]] = values[new]
        self.has_log_prob[ids] = True

    def write_choices(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write what is not there yet."""
        new = ~self.has_choice[ids]
        self.choices[ids[new]] = values[new]
        self.has_choice[ids] = True


def _needed(trie: Trie, trees: list[DraftTree], known: list[TreeScores | None], values: _Values) -> torch.Tensor:
    """`(M,)` bool: nodes to be forwarded, because something must be read from them or from what is below them."""
    needed = torch.zeros(trie.slots + len(trie.parents), dtype=torch.bool, device=trie.parents.device)
    for tree, ids, some in zip(trees, trie.ids, known, strict=True):
        if some is not None:
            continue
        parents, children = ids.gather(1, tree.parents)[:, 1:], ids[:, 1:]
        missing = ~values.has_log_prob[children] | ~values.has_choice[parents]
        needed[parents[missing]] = True
    needed[: trie.slots] = False
    for _ in range(int(trie.offsets.max()) - 1 if len(trie.offsets) else 0):  # and all above them
        needed[trie.parents[needed[trie.slots :]]] = True
        needed[: trie.slots] = False
    return needed[trie.slots :]


def _of_trees(
    tree: DraftTree,
    ids: torch.Tensor,
    values: _Values,
    eos_ids: torch.Tensor,
    keep: torch.Tensor,
) -> TreeScores:
    """Values of a trie's ids back to the nodes of trees."""
    ended = torch.isin(tree.tokens, eos_ids)
    log_probs = values.log_probs[ids].masked_fill_(ended.gather(1, tree.parents), -torch.inf)
    log_probs[:, 0] = 0
    log_probs.masked_fill_(~keep[:, None], 0)
    choices = values.choices[ids].masked_fill_(ended | tree.leaves(), -1)
    return TreeScores(node_log_probs=log_probs, choices=choices)


def _read_text(
    trie: Trie,
    input_ids: torch.Tensor,
    readout: Readout,
    values: _Values,
    temperature: float,
    draws: torch.Tensor | None,
) -> None:
    """Choices at the slots that roots and nodes stand on, and log-probabilities of what hangs below them."""
    batch, length = input_ids.shape
    used = torch.zeros(trie.slots, dtype=torch.bool, device=input_ids.device)
    for ids in trie.ids:
        used[ids[ids < trie.slots]] = True
    slots = used.nonzero()[:, 0]
    row, column = slots // length, (slots % length).clamp(readout.first, readout.last - 1)
    numbers = torch.full_like(used, -1, dtype=torch.long)
    numbers[slots] = torch.arange(len(slots), device=slots.device)
    # Below each used slot: the next token of the text, unless the row ends, and nodes.
    inside = slots[slots % length < length - 1]
    hanging = (trie.parents < trie.slots).nonzero()[:, 0]
    below = torch.cat([inside + 1, trie.slots + hanging])
    tokens = torch.cat([input_ids.flatten(), trie.tokens])[below]
    parent = torch.cat([inside, trie.parents[hanging]])

    def logits(some: slice) -> torch.Tensor:
        return readout.logits(row[some], column[some])

    _read(logits, slots, below, numbers[parent], tokens, values, temperature, draws)


# Rows of logits turned to float32 at a time: bounds the copy.
_ROWS = 128


def _read(
    logits: Callable[[slice], torch.Tensor],
    ids: torch.Tensor,
    below: torch.Tensor,
    parent: torch.Tensor,
    tokens: torch.Tensor,
    values: _Values,
    temperature: float,
    draws: torch.Tensor | None,
) -> None:
    """
    Write the choice after nodes `ids` `(n,)`, and the log-probabilities of `tokens` `(C,)`, which are the nodes `below`.

    Args:
        logits (`Callable`): Logits `(k, V)` of a slice of the nodes.
        parent (`torch.LongTensor` of shape `(C,)`): Which of the `n` nodes each token follows.
        draws (`torch.DoubleTensor`, *optional*): Of all nodes, to draw the choice by.
    """
    for start in range(0, len(ids), _ROWS):
        some = slice(start, min(start + _ROWS, len(ids)))
        made = logits(some)
        scores = made.float() / temperature
        normaliser = scores.logsumexp(-1)
        values.teach(ids[some], scores, normaliser, made.dtype)
        here = ((parent >= start) & (parent < start + len(scores))).nonzero()[:, 0]
        at = parent[here] - start
        values.write_log_probs(below[here], scores[at, tokens[here]] - normaliser[at])
        if draws is None:
            chosen = scores.argmax(-1)
        else:
            chosen = drawn_tokens(scores, draws[ids[some].cpu()])
        values.write_choices(ids[some], chosen)


def _forward(
    target: Any,
    head: LogitHead | None,
    cache: Any,
    trie: Trie,
    sequences: Sequences,
    group: torch.Tensor,
    values: _Values,
    temperature: float,
    draws: torch.Tensor | None,
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
    inputs: dict[str, Any] = {}
    final = text_config(target).num_hidden_layers
    if head is not None:  # logits are made from last hidden states, a few nodes at a time; see `read_target`
        inputs = {"output_hidden_states": [final], "logits_to_keep": torch.zeros(1, dtype=torch.long, device=device)}
    # The target's own dtype, as when it read the sequences: mixed precision is the draft's.
    with torch.autocast(device.type, enabled=False):
        output = target(
            **inputs,
            input_ids=trie.tokens[node],
            position_ids=positions,
            attention_mask=backend_mask(target, mask, target.dtype, positions, keys),
            cache=cache,
            use_cache=True,
        )
    cache.crop(-size)
    row, col = real.nonzero(as_tuple=True)
    number = torch.full((len(trie.parents) + 1,), -1, dtype=torch.long, device=device)
    number[group[real]] = torch.arange(len(row), device=device)
    # The last entry answers for parents on the text.
    above = number[(trie.parents - trie.slots).clamp(min=-1)]
    below = (above >= 0).nonzero()[:, 0]

    states = output.logits if head is None else boundary_features(output.hidden_states, [final])

    def logits(some: slice) -> torch.Tensor:
        found = states[row[some], col[some]]
        with torch.autocast(device.type, enabled=False):
            return found if head is None else head(found)

    nodes = trie.slots + group[real]
    _read(logits, nodes, trie.slots + below, above[below], trie.tokens[below], values, temperature, draws)
