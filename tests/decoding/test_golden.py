# SPDX-License-Identifier: Apache-2.0
"""
Accepted lengths of a fixed tiny target and draft, in float64: acceptance must not move by accident.

The weights (`tests/golden/`) were trained once on random texts of the tiny target. A change of these lists belongs in a
commit that says why the acceptance length moved.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gto_hf import TreeConfig, record_rounds
from tests.tiny import tiny_draft, tiny_target


FOLDER = Path(__file__).parent.parent / "golden"
TREES = {"tree": TreeConfig(4, 5, 20), "chain": TreeConfig(4, 1, 4), "wide": TreeConfig(2, 8, 12)}
GOLDEN = {
    "tree": [
        [3, 3, 2, 2, 2, 2, 3, 2, 3, 1],
        [3, 4, 4, 4, 4, 4],
        [3, 3, 3, 3, 3, 3, 3, 2],
        [3, 3, 4, 4, 4, 4, 1],
        [3, 3, 3, 3, 2, 1, 2, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 3, 3, 3, 3],
    ],
    "chain": [
        [5, 3, 2, 2, 2, 1, 4, 4],
        [5, 5, 5, 5, 3],
        [5, 5, 5, 5, 3],
        [2, 5, 5, 5, 5, 1],
        [1, 1, 1, 1, 1, 1, 1, 5, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 2, 2, 1, 1, 1],
    ],
    "wide": [
        [3, 3, 2, 2, 2, 2, 2, 3, 3, 1],
        [3, 3, 3, 3, 3, 3, 3, 2],
        [3, 3, 3, 3, 3, 3, 3, 2],
        [3, 3, 3, 3, 3, 3, 3, 2],
        [2, 1, 3, 3, 3, 2, 1, 2, 1, 1, 1, 2, 1],
        [1, 1, 2, 2, 2, 2, 2, 3, 3, 2, 2, 1],
    ],
}


@pytest.fixture(scope="module")
def fixed():
    target = tiny_target("llama")
    draft = tiny_draft(target, vocab=60)
    for model, name in ((target, "target"), (draft, "draft")):
        state = load_file(FOLDER / f"{name}.safetensors")
        model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()}, strict=True)
        model.double()
    return target, draft


def accepted_lengths(target, draft, tree):
    """Tokens emitted per round for six prompts: four that were trained on, two that were not."""
    learned = torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(5))
    others = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(11))
    prompts = torch.cat([learned, others])
    draft.tree = tree
    lists = []
    for prompt in prompts:
        with record_rounds() as recorder:
            target.generate(
                prompt[None],
                attention_mask=torch.ones(1, 6, dtype=torch.long),
                assistant_model=draft,
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=None,
            )
        lists.append([len(r.emitted) for r in recorder.rounds])
    return lists


@pytest.mark.parametrize("name", TREES)
def test_accepted_lengths_are_those_recorded(fixed, name):
    assert accepted_lengths(*fixed, TREES[name]) == GOLDEN[name]
