# SPDX-License-Identifier: Apache-2.0
"""What a round costs beside the two models: synchronisations, Python per node, memory."""

import gc
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gto_hf import TreeConfig
from tests.families import FAMILIES, prompt
from tests.oracle import OracleDraft
from tests.tiny import tiny_draft


def generate(model, ids, draft, **kwargs):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        **{"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True, **kwargs},
    )


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(model, draft, tree, new):
    draft.tree = tree
    with Count() as count:
        out = generate(model, prompt(1, 12), draft, max_new_tokens=new)
    return count.calls, out.statistics


@pytest.mark.parametrize("kwargs", [{}])
def test_waiting_for_the_device_and_operators_per_round_do_not_grow_with_the_tree(kwargs):
    """The same number of levels with 8 and with 60 nodes; a difference of two lengths leaves the rounds alone."""
    model = FAMILIES["llama"].build()
    draft = tiny_draft(model, vocab=60)
    per_round = {}
    for nodes in (8, 60):
        tree = TreeConfig(4, 8, nodes)
        short, a = operators(model, draft, tree, 15)
        long, b = operators(model, draft, tree, 40)
        rounds, tokens = b.rounds - a.rounds, b.emitted_tokens - a.emitted_tokens
        waits = sum(long[n] - short[n] for n in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"))
        # Per token one answer of the stopping criteria; per round the choices, the tree, its depth and the ties of
        # `stable_topk` (one per level and one for pruning).
        assert waits <= 2 * tokens + (4 + 2 * tree.depth) * rounds
        per_round[nodes] = (sum(long.values()) - sum(short.values())) / rounds
    assert per_round[60] < 1.1 * per_round[8]


def test_the_draft_head_runs_once_per_level():
    model = FAMILIES["llama"].build()
    draft = tiny_draft(model, vocab=60)
    draft.tree = TreeConfig(4, 8, 40)
    calls = []
    hook = draft.lm_head.register_forward_hook(lambda *a: calls.append(1))
    try:
        out = generate(model, prompt(1, 12), draft, max_new_tokens=10)
    finally:
        hook.remove()
    assert len(calls) <= out.statistics.rounds * draft.tree.depth


def test_nothing_piles_up_over_200_calls():
    model = FAMILIES["llama"].build()
    ids = prompt(2, 8)
    drafts = [tiny_draft(model, vocab=60), OracleDraft.for_texts(model, generate(model, ids, None).sequences)]
    drafts[1].tree = TreeConfig(4, 3, 12, auto=True)

    def tensors():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    sizes = []
    for call in range(200):
        generate(model, ids, drafts[call % 2], max_new_tokens=6)
        if call in (19, 199):
            sizes.append(tensors())
    assert sizes[1] <= sizes[0]
