# SPDX-License-Identifier: Apache-2.0
"""
What the target says at every node of many trees of a sequence, from few forwards. Level 4.

All trees hang on the sequence's own KV cache: a node sees the sequence up to its root and its own ancestors. Whole trees
of all rows of a batch share a forward; the cache is cropped back after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gto_hf.target import backend_mask
from gto_hf.tree import DraftTree


@dataclass(frozen=True)
class TreeScores:
    """
    The target's view of `R` trees.

    Attributes:
        node_log_probs (`torch.FloatTensor` of shape `(R, N + 1)`): Log-probability (nats) of each node's token after
            its parent's path; -inf below an end-of-sequence token. Column 0 is 0.
        choices (`torch.LongTensor` of shape `(R, N + 1)`): The target's next token after each node (argmax or sample);
            -1 at end-of-sequence nodes.
        nodes (`int`): Tokens forwarded through the target.
    """

    node_log_probs: torch.Tensor
    choices: torch.Tensor
    nodes: int


@torch.no_grad()
def score_trees(
    target: Any,
    cache: Any,
    tree: DraftTree,
    roots: torch.Tensor,
    root_logits: torch.Tensor,
    valid: torch.Tensor,
    position_ids: torch.Tensor,
    eos_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    sample: torch.Generator | None = None,
    max_nodes: int = 1024,
) -> TreeScores:
    """
    Score `n` trees of each of `B` sequences.

    Args:
        target (`PreTrainedModel`): Frozen causal LM.
        cache (`DynamicCache`): Keys and values of the whole sequences; unchanged on return.
        tree ([`DraftTree`] of `B * n` rows): Sequence-major: rows `b * n` to `b * n + n - 1` belong to sequence `b`.
        roots (`torch.LongTensor` of shape `(B, n)`): Slot of each root in its sequence.
        root_logits (`torch.FloatTensor` of shape `(B, n, V)`): The target's logits at the roots, from the sequence.
        valid (`torch.BoolTensor` of shape `(B, T)`): False for padding.
        position_ids (`torch.LongTensor` of shape `(B, T)`): As the sequence was forwarded.
        eos_ids (`torch.LongTensor` of shape `(E,)`): Nothing below these is accepted.
        temperature (`float`, *optional*, defaults to `1.0`): Of the target's distribution.
        sample (`torch.Generator`, *optional*): Draw `choices` instead of taking the most likely token.
        max_nodes (`int`, *optional*, defaults to `1024`): Nodes per sequence and forward (at least one whole tree).
    """
    batch, trees = roots.shape
    size = tree.tokens.shape[1] - 1
    length = valid.shape[1]
    visible = valid[:, None] & (torch.arange(length, device=roots.device) <= roots[..., None])  # (B, n, T)
    root_positions = position_ids.gather(1, roots)
    ancestors = tree.ancestor_mask()[:, 1:, 1:].view(batch, trees, size, size)
    tokens, depths, parents = (x.view(batch, trees, size + 1) for x in (tree.tokens, tree.depths, tree.parents))
    log_probs, choices = [], []
    per_forward = max(1, max_nodes // size)
    for start in range(0, trees, per_forward):
        some = slice(start, start + per_forward)
        count = tokens[:, some].shape[1]
        logits = _forward(
            target,
            cache,
            tokens[:, some, 1:].flatten(1),
            (root_positions[:, some, None] + depths[:, some, 1:]).flatten(1),
            visible[:, some],
            ancestors[:, some],
            position_ids,
        ).view(batch, count, size, -1)
        chunk_log_probs, chunk_choices = _read(
            logits, root_logits[:, some], tokens[:, some], parents[:, some], temperature, sample
        )
        log_probs.append(chunk_log_probs)
        choices.append(chunk_choices)
    ended = torch.isin(tokens, eos_ids)
    node_log_probs = torch.cat(log_probs, 1).masked_fill_(ended.gather(2, parents), -torch.inf)
    node_log_probs[..., 0] = 0
    return TreeScores(
        node_log_probs=node_log_probs.flatten(0, 1),
        choices=torch.cat(choices, 1).masked_fill_(ended, -1).flatten(0, 1),
        nodes=batch * trees * size,
    )


def _forward(
    target: Any,
    cache: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    ancestors: torch.Tensor,
    sequence_positions: torch.Tensor,
) -> torch.Tensor:
    """Logits `(B, c * N, V)` of `c` whole trees per sequence; `visible` `(B, c, T)`, `ancestors` `(B, c, N, N)`."""
    batch, count, size, _ = ancestors.shape
    to_sequence = visible[:, :, None].expand(-1, -1, size, -1).flatten(1, 2)
    to_nodes = torch.zeros(batch, count, size, count, size, dtype=torch.bool, device=tokens.device)
    index = torch.arange(count, device=tokens.device)
    to_nodes[:, index, :, index] = ancestors.transpose(0, 1)
    mask = torch.cat([to_sequence, to_nodes.view(batch, count * size, count * size)], dim=-1)
    keys = torch.cat([sequence_positions, positions], dim=-1)
    # The target's own dtype, as when it read the sequences: mixed precision is the draft's.
    with torch.autocast(tokens.device.type, enabled=False):
        output = target(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=backend_mask(target, mask, target.dtype, positions, keys),
            cache=cache,
            use_cache=True,
        )
    cache.crop(-count * size)
    return output.logits


def _read(
    logits: torch.Tensor,
    root_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    temperature: float,
    sample: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every node after its parent, and the target's choice after every node, `(B, c, N + 1)`."""
    log_probs, choices = [], []
    for i in range(tokens.shape[1]):  # one tree of every sequence at a time bounds the float32 copy
        scores = torch.cat([root_logits[:, i, None].float(), logits[:, i].float()], dim=1)  # (B, N + 1, V)
        if temperature != 1.0:
            scores = scores / temperature
        parent, token = parents[:, i], tokens[:, i]
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        log_probs.append(scores[rows, parent, token] - scores.logsumexp(-1).gather(1, parent))
        if sample is None:
            choices.append(scores.argmax(-1))
        else:
            drawn = torch.multinomial(scores.softmax(-1).flatten(0, 1).cpu(), 1, generator=sample)
            choices.append(drawn.view(parent.shape).to(parent.device))
    return torch.stack(log_probs, 1), torch.stack(choices, 1)
