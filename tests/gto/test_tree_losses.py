# SPDX-License-Identifier: Apache-2.0
"""Objectives on whole trees against plain loops over nodes, in value and gradient."""

import pytest
import torch

from gto_hf.gto import SequencePrefix, plan_trees, read_target, tree_loss, tree_losses
from tests.gto.plans import EOS_IDS, TREE, batch_of, perturbed
from tests.reference.naive_eagle3 import NaiveEagle3
from tests.reference.naive_gto import node_probs, target_log_probs
from tests.tiny import tiny_draft


GROUPS = torch.tensor([[[3, 4], [6, 7]]] * 3)


def planned(target, draft, batch, valid):
    ids, mask, _ = batch
    reading = read_target(target, ids, mask, list(draft.config.feature_layers), 0, ids.shape[1], use_cache=True)
    plan = plan_trees(
        draft, reading.sequences, GROUPS, valid, TREE, target, reading.cache, reading.readout, EOS_IDS, max_nodes=20
    )
    return reading, plan


def naive(target, draft, features, prefix, tree, objective, beta):
    """The loss of one tree, node by node: the draft re-reads the whole path for each."""
    plain = NaiveEagle3(draft, target.get_input_embeddings().weight.detach())
    kept = draft.kept_ids.tolist()
    tokens, parents = tree["tokens"], tree["parents"]
    probs = node_probs(target, prefix, tree, {2})
    total = torch.zeros(())
    cut = min(tree["scores"])
    for node in range(len(tokens)):
        if node not in parents[1:] or (node and tokens[node] == 2):
            continue
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        said = plain.logits(features, prefix, path)
        q = said[-1].log_softmax(-1)
        p = target_log_probs(target, prefix + path)[-1]
        if objective == "tree_kl":
            value = -(p[kept].softmax(-1) * q).sum()
        else:
            score = sum(row.log_softmax(-1)[kept.index(t)] for row, t in zip(said, path, strict=False))
            edge = max(cut, (score + q).topk(TREE.top_k).values[-1].item())
            value = -(p[kept].exp() * ((score + q - edge) / beta).sigmoid()).sum()
        total = total + probs[node] * value
    return total


@pytest.mark.parametrize("nodes_at_a_time", [1000, 5])
@pytest.mark.parametrize("objective, beta", [("tree_kl", 1.0), ("membership", 1.0), ("membership", 0.3)])
def test_a_tree_loss_is_the_sum_over_its_inner_nodes(llama, rows, objective, beta, nodes_at_a_time, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tree_losses, "LOSS_ELEMENTS", nodes_at_a_time * 48)
    draft = perturbed(tiny_draft(llama), 0.02)
    batch = batch_of(llama, rows)
    valid = torch.ones(3, 2, dtype=torch.bool)
    reading, plan = planned(llama, draft, batch, valid)
    losses = tree_loss(SequencePrefix(draft, reading.sequences), plan, objective, beta)
    total = torch.zeros(())
    for b, row in enumerate(rows):
        for i, t in enumerate(GROUPS[b].flatten().tolist()):
            n = b * 4 + i
            trees = plan.trees
            tree = {
                "tokens": trees.tokens[n].tolist(),
                "parents": trees.parents[n].tolist(),
                "scores": trees.scores[n].tolist(),
            }
            tree["paths"] = [paths_to(tree, column, row[: t + 1]) for column in range(len(tree["tokens"]))]
            expected = naive(llama, draft, reading.sequences.features[b, :t], row[: t + 1], tree, objective, beta)
            torch.testing.assert_close(losses[n], expected, atol=1e-4, rtol=1e-4)
            total = total + expected
    mine = torch.autograd.grad(losses.sum(), list(draft.parameters()))
    theirs = torch.autograd.grad(total, list(draft.parameters()))
    for (name, _), a, b in zip(draft.named_parameters(), mine, theirs, strict=True):
        assert a.abs().sum() > 0, name
        torch.testing.assert_close(a / b.abs().max(), b / b.abs().max(), atol=5e-4, rtol=1e-3, msg=name)


def paths_to(tree, column, prefix):
    """As naive_tree names a node: two leading entries, then the drafted tokens."""
    path = []
    while column:
        path.insert(0, tree["tokens"][column])
        column = tree["parents"][column]
    return (None, prefix[-1], *path)


def test_groups_that_do_not_exist_cost_nothing(llama, rows):  # noqa: F811
    draft = perturbed(tiny_draft(llama), 0.02)
    batch = batch_of(llama, rows)
    valid = torch.tensor([[True, False], [True, True], [False, False]])
    reading, plan = planned(llama, draft, batch, valid)
    losses = tree_loss(SequencePrefix(draft, reading.sequences), plan)
    kept = valid.flatten().repeat_interleave(2)
    assert (losses[~kept] == 0).all() and (losses[kept] > 0).all()
    assert plan.of_groups(losses).shape == (3, 2)


def test_soft_membership_becomes_the_expected_acceptance(llama, rows):  # noqa: F811
    """With a sharp edge a child counts exactly if the tree holds it, and half if it is the last one that fits."""
    draft = perturbed(tiny_draft(llama), 0.02)
    reading, plan = planned(llama, draft, batch_of(llama, rows), torch.ones(3, 2, dtype=torch.bool))
    with torch.no_grad():
        soft = -plan.of_groups(tree_loss(SequencePrefix(draft, reading.sequences), plan, "membership", 1e-6))
    trees = plan.trees
    for n, value in enumerate(soft.flatten()):
        parents, scores = trees.parents[n].tolist(), trees.scores[n].tolist()
        expected = 0.0
        for parent in set(parents[1:]):
            children = [c for c in range(1, len(parents)) if parents[c] == parent]
            edge = {
                c for c in children if len(children) == TREE.top_k and scores[c] == min(scores[i] for i in children)
            }
            edge |= {c for c in children if scores[c] == min(scores)}
            expected += sum(float(plan.probs[n, c]) * (0.5 if c in edge else 1.0) for c in children)
        assert float(value) == pytest.approx(expected, abs=2e-3)
