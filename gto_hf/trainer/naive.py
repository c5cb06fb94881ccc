# SPDX-License-Identifier: Apache-2.0
"""
The tree rewards of a step as one would first write them down from the paper: the slow reference of `gto-hf bench train`.

One root at a time, one tree after the other, each with a target forward of its own over all its nodes. The target's cache
of the row is reused by cropping it back from root to root; between trees nothing is shared. Level 6.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gto_hf.drafts import DraftModel
from gto_hf.gto import SequencePrefix, Sequences, prefix_probs, tree_reward
from gto_hf.target import backend_mask
from gto_hf.tree import DraftTree, TreeConfig


@dataclass(frozen=True)
class NaiveRewards:
    """
    Rewards at `n` roots of one row.

    Attributes:
        roots (`torch.LongTensor` of shape `(n,)`): Slots, as they were given.
        rewards, reference_rewards (`torch.FloatTensor` of shape `(n,)`): Of the draft's and the reference's trees.
        target_tokens (`int`): Tokens forwarded through the target: `n` times both trees with their root.
    """

    roots: torch.Tensor
    rewards: torch.Tensor
    reference_rewards: torch.Tensor
    target_tokens: int


@torch.no_grad()
def naive_rewards(
    draft: DraftModel,
    reference: DraftModel,
    sequence: Sequences,
    roots: torch.Tensor,
    tree: TreeConfig,
    target: Any,
    cache: Any,
    eos_ids: torch.Tensor,
    *,
    aggregation: str = "lse",
    eta: float = 1.0,
    temperature: float = 1.0,
    as_reference: Callable[[], AbstractContextManager] = nullcontext,
    phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
) -> NaiveRewards:
    """
    Rewards of the trees of `draft` and `reference` below some roots of one row; the slow twin of [`plan_groups`].

    Args:
        sequence ([`Sequences`]): One row without padding.
        roots (`torch.LongTensor` of shape `(n,)`): Slots of the roots, ascending, each at least 1.
        cache (`Cache`): Keys and values of the whole row; cut back to the first root on return.
        phase (`Callable`): Entered around the parts of the work, by name: `"rows"` (once per row), `"trees"`, `"scoring"`.
        Others: See [`plan_groups`].

    Raises:
        ValueError: If there are several rows, if there is padding, or if the roots do not ascend.
    """
    if len(sequence.input_ids) != 1 or not bool(sequence.valid.all()):
        raise ValueError("`sequence` must be one row without padding: the naive loop takes one row at a time.")
    if not bool((roots.diff() > 0).all()):
        raise ValueError(
            f"`roots={roots.tolist()}` must ascend: the cache is cut back from the last root to the first."
        )
    with phase("rows"):
        own_prefix = SequencePrefix(draft, sequence)
        with as_reference():
            reference_prefix = SequencePrefix(reference, sequence)
    made = roots.new_zeros(2, len(roots), dtype=torch.float32)
    tokens = 0
    for number in reversed(range(len(roots))):
        root = roots[number].view(1, 1)
        with phase("trees"):
            own = own_prefix.grow(root, tree)
            with as_reference():
                other = reference_prefix.grow(root, tree)
        with phase("scoring"):
            for which, grown in enumerate((own, other)):
                log_probs = node_log_probs(target, cache, grown, int(root), sequence, eos_ids, temperature)
                made[which, number] = tree_reward(grown, prefix_probs(grown, log_probs), aggregation, eta)[0]
                tokens += grown.tokens.shape[1]
    return NaiveRewards(roots, made[0], made[1], tokens)


@torch.no_grad()
def node_log_probs(
    target: Any,
    cache: Any,
    tree: DraftTree,
    root: int,
    sequence: Sequences,
    eos_ids: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """
    Log-probability (nats) of each node's token after its parent's path, `(1, N + 1)`, from one forward over one whole tree.

    Args:
        cache (`Cache`): Keys and values of the row up to `root` at least; cut back to the slots before `root`.
        tree ([`DraftTree`]): One tree. root (`int`): Its slot.
    """
    cache.crop(min(root - cache.get_seq_length(), 0))
    before = sequence.position_ids[:, :root]
    positions = sequence.position_ids[:, root : root + 1] + tree.depths
    within = tree.ancestor_mask()
    mask = torch.cat([within.new_ones(1, within.shape[1], root), within], dim=-1)
    keys = torch.cat([before, positions], dim=-1)
    # The target's own dtype, as when it read the row: mixed precision is the draft's.
    with torch.autocast(tree.tokens.device.type, enabled=False):
        logits = target(
            input_ids=tree.tokens,
            position_ids=positions,
            attention_mask=backend_mask(target, mask, target.dtype, positions, keys),
            cache=cache,
            use_cache=True,
        ).logits
    cache.crop(-tree.tokens.shape[1])
    says = (logits[0].float() / temperature).log_softmax(-1)
    log_probs = says[tree.parents[0], tree.tokens[0]][None]
    ended = torch.isin(tree.tokens, eos_ids)
    log_probs = log_probs.masked_fill(ended.gather(1, tree.parents), -torch.inf)
    log_probs[:, 0] = 0
    return log_probs
