# SPDX-License-Identifier: Apache-2.0
"""Rewards and accepted paths of training against naive loops, enumeration, and sampled decodes."""

import pytest
import torch

from gto_hf import TreeConfig
from gto_hf.decoding import DecodingStatistics
from gto_hf.gto import (
    SequencePrefix,
)
from tests.families import FAMILIES
from tests.gto.plans import TREE, batch_of, perturbed, plan_for
from tests.reference import naive_gto
from tests.reference.naive_eagle3 import NaiveEagle3, PathModel
from tests.reference.naive_tree import naive_tree
from tests.tiny import EOS, tiny_draft, tiny_target


@pytest.mark.parametrize("aggregation, eta", [("lse", 1.0), ("lse", 3.0), ("max", 1.0), ("mean", 1.0), ("nodes", 1.0)])
@pytest.mark.parametrize("pad_left", [False, True])
def test_rewards_and_paths_equal_the_naive_loop(llama, rows, aggregation, eta, pad_left):
    reference = tiny_draft(llama)
    draft = perturbed(reference)
    batch = batch_of(llama, rows, pad_left=pad_left)
    plan, reading, groups, valid = plan_for(llama, draft, reference, batch, aggregation=aggregation, eta=eta)
    assert valid.all()
    embedding = llama.get_input_embeddings().weight
    checked = 0
    for b, row in enumerate(rows):
        shift = batch[0].shape[1] - len(row) if pad_left else 0
        features = reading.sequences.features[b, shift : shift + len(row)]
        for g in range(groups.shape[1]):
            found = {"draft": [], "reference": []}
            for i, slot in enumerate(groups[b, g].tolist()):
                t = slot - shift
                prefix = row[: t + 1]
                number = (b * groups.shape[1] + g, i)
                for name, model in (("draft", draft), ("reference", reference)):
                    with torch.no_grad():
                        naive = NaiveEagle3(model, embedding)
                        tree = naive_tree(
                            PathModel(naive, features[:t], prefix),
                            0,
                            prefix[-1],
                            TREE.depth,
                            TREE.top_k,
                            TREE.total_tokens,
                        )
                    probs = naive_gto.node_probs(llama, prefix, tree, {EOS})
                    found[name].append(naive_gto.reward(tree, probs, aggregation, eta))
                    got = (plan.rewards if name == "draft" else plan.reference_rewards)[number]
                    assert abs(found[name][-1] - got) < 1e-4
                    got = (plan.expected if name == "draft" else plan.reference_expected)[number]
                    assert abs(sum(probs[1:]) - got) < 1e-4
                    if name == "draft":
                        path = naive_gto.accepted_path(llama, prefix, tree, {EOS})
                        n = number[0] * groups.shape[2] + i
                        assert plan.lengths[n] == len(path)
                        assert plan.paths[n, : len(path)].tolist() == path
                        with torch.no_grad():
                            expected = naive_gto.path_log_prob(
                                NaiveEagle3(reference, embedding), features[:t], prefix, path
                            )
                        torch.testing.assert_close(plan.reference_log_probs[number], expected, atol=1e-4, rtol=1e-4)
                        checked += len(path) + 1
            expected = torch.tensor(naive_gto.advantages(found["draft"], found["reference"], 1e-4))
            torch.testing.assert_close(plan.advantages[number[0]], expected, atol=2e-2, rtol=2e-2)
    assert checked > 0


@pytest.mark.parametrize("name", ["mistral", "llama4_text", "gemma3_text"])
@pytest.mark.parametrize("pad_left", [False, True])
def test_rewards_and_paths_equal_the_naive_loop_on_targets_with_windows(name, pad_left):
    """Windows of 8 tokens and chunks of 16 over rows of up to 18: nodes see by token index, and nothing is evicted."""
    target = FAMILIES[name].build()
    target.get_input_embeddings().weight.data *= 3  # rows that differ more
    torch.manual_seed(2)
    rows = [torch.randint(3, 60, (n,)).tolist() for n in (18, 13, 16)]
    test_rewards_and_paths_equal_the_naive_loop(target, rows, "nodes", 1.0, pad_left)


def test_rewards_equal_enumeration_of_all_continuations_on_a_tiny_vocabulary():
    """The node sum is the expected accepted length over every continuation the target can write."""
    import itertools

    target = tiny_target(vocab=5, sharpness=3.0)
    draft = tiny_draft(target, vocab=4, tree=TreeConfig(3, 3, 8))
    ids = torch.tensor([[3, 4, 3, 4, 4, 3]])
    plan, reading, groups, _ = plan_for(
        target,
        draft,
        draft,
        (ids, torch.ones_like(ids), ids),
        groups=torch.tensor([[[3, 4]]]),
        valid=torch.ones(1, 1).bool(),
    )
    with torch.no_grad():
        trees = SequencePrefix(draft, reading.sequences).grow(groups.flatten(1), TREE)
    for i, t in enumerate((3, 4)):
        tokens, parents = trees.tokens[i].tolist(), trees.parents[i].tolist()
        prefix, expected = ids[0, : t + 1].tolist(), 0.0
        for text in itertools.product(range(5), repeat=3):
            rows = naive_gto.target_log_probs(target, prefix + list(text))
            p, at, accepted, alive = 1.0, 0, 0, True
            for j, token in enumerate(text):
                p *= rows[t + j, token].exp().item()
                child = [c for c in range(1, len(tokens)) if parents[c] == at and tokens[c] == token]
                alive = alive and bool(child)
                if alive:
                    accepted, at = accepted + 1, child[0]
                    alive = token != EOS
            expected += p * accepted
        assert abs(plan.expected[0, i] - expected) < 1e-4


class _Force:
    """Fixes the first token, so that every run drafts its first tree below the same root."""

    def __init__(self, length, token):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.token] = 0
        return scores


def test_expected_acceptance_equals_the_mean_of_sampled_decodes(monkeypatch):
    target = tiny_target(sharpness=2.0)
    draft = tiny_draft(target, vocab=60, tree=TREE)
    prompt, first, draws = torch.randint(3, 60, (1, 8)), 20, 3000
    rows, accepted = 100, []
    original = DecodingStatistics.add_rounds

    def add_rounds(self, each, drafted):
        if self.rounds == 0:
            accepted.extend(count for count, _ in each)
        original(self, each, drafted)

    monkeypatch.setattr(DecodingStatistics, "add_rounds", add_rounds)
    for seed in range(draws // rows):
        torch.manual_seed(seed)
        target.generate(
            prompt.expand(rows, -1),
            attention_mask=torch.ones(rows, prompt.shape[1]),
            assistant_model=draft,
            do_sample=True,
            top_k=0,
            max_new_tokens=2 + TREE.depth,  # the forced token, and a whole round
            eos_token_id=None,
            logits_processor=[_Force(prompt.shape[1], first)],
        )
    ids = torch.cat([prompt, torch.tensor([[first, 5]])], 1)
    groups, valid = torch.tensor([[[prompt.shape[1]]]]), torch.ones(1, 1, dtype=torch.bool)
    plan, *_ = plan_for(target, draft, draft, (ids, torch.ones_like(ids), ids), groups=groups, valid=valid)
    counts = torch.tensor(accepted, dtype=torch.float64)
    assert len(counts) == draws and counts.mean() > 0.05
    error = counts.std() / draws**0.5
    assert abs(counts.mean() - plan.expected.item()) < 4 * error
