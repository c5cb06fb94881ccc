# SPDX-License-Identifier: Apache-2.0
"""Batches of unequal rows, and the trees that training plans for them."""

import copy

import torch

from gto_hf import TreeConfig
from gto_hf.gto import (
    plan_groups,
    read_target,
    roots_of,
    sample_groups,
    supervised_targets,
)
from tests.tiny import EOS


TREE = TreeConfig(depth=3, top_k=3, total_tokens=8)
EOS_IDS = torch.tensor([EOS])


def batch_of(target, rows, *, pad_left=False):
    """(input_ids, attention_mask, labels) of rows of unequal length; the first 3 tokens are the prompt."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if pad_left else slice(0, len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
        labels[i, where] = torch.tensor([-100] * 3 + row[3:])
    return ids, mask, labels


def plan_for(target, draft, reference, batch, *, groups=None, valid=None, num_groups=2, size=3, **kwargs):
    ids, mask, labels = batch
    targets = supervised_targets(labels, ids, EOS_IDS)
    roots = roots_of(targets)
    if groups is None:
        groups, valid = sample_groups(roots, num_groups, size, torch.Generator().manual_seed(0))
    reading = read_target(target, ids, mask, list(draft.config.feature_layers), 0, ids.shape[1], use_cache=True)
    plan = plan_groups(
        draft, reference, reading.sequences, groups, valid, TREE, target, reading.cache, reading.readout, EOS_IDS,
        max_nodes=20, **kwargs,
    )  # fmt: skip
    assert reading.cache.get_seq_length() == ids.shape[1]  # scoring leaves the cache as it was
    return plan, reading, groups, valid


def perturbed(draft, scale=0.05, seed=0):
    other = copy.deepcopy(draft)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * scale)
    return other
