# SPDX-License-Identifier: Apache-2.0
"""The trees that decoding drafts, against those that training grows at the same places."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gto_hf import DraftModel
from gto_hf.decoding.drafter import Drafter
from gto_hf.gto import SequencePrefix, read_target


def compare_trees(target: PreTrainedModel, draft: DraftModel, prompt: torch.Tensor, new: int = 40) -> int:
    """Assert that both agree at every root of a text below `prompt` `(1, L)`; returns how many roots there were."""
    drafted = []
    original = Drafter.grow

    def grow(self, root_tokens, config, growth=None):
        tree = original(self, root_tokens, config, growth)
        if config == draft.tree:  # the last trees before the limit are smaller
            # The root stands at slot = number of pairs; who reads the text itself has read the root as well.
            drafted.append((self.prefix.valid.shape[1] - (not draft.reads_features), tree))
        return tree

    Drafter.grow = grow
    try:
        text = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft, max_new_tokens=new, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
    finally:
        Drafter.grow = original
    with torch.no_grad():
        layers = list(draft.config.feature_layers)
        reading = read_target(target, text, torch.ones_like(text), layers, 0, 1, use_cache=False)
        roots = torch.tensor([[slot for slot, _ in drafted]])
        trained = SequencePrefix(draft, reading.sequences).grow(roots, draft.tree)
    for i, (_, tree) in enumerate(drafted):
        assert torch.equal(trained.tokens[i], tree.tokens[0])
        assert torch.equal(trained.parents[i], tree.parents[0])
        torch.testing.assert_close(trained.scores[i], tree.scores[0], atol=1e-4, rtol=1e-4)
    return len(drafted)
