# SPDX-License-Identifier: Apache-2.0
"""Training's trees, losses and gradients against decoding and against plain loops."""

import copy

import pytest
import torch

from gto_hf.gto import (
    SequencePrefix,
    draft_forward,
    gto_loss,
    padded_positions,
    plan_groups,
    read_target,
    roots_of,
    supervised_steps,
    supervised_targets,
    token_loss,
)
from tests.gto.plans import EOS_IDS, TREE, batch_of, perturbed, plan_for
from tests.reference import naive_gto
from tests.reference.naive_eagle3 import NaiveEagle3
from tests.tiny import EOS, tiny_draft
from tests.trees import compare_trees


# ---------------------------------------------------------------- one policy
def test_the_training_tree_is_the_decoding_tree(trained):
    """At every position: same tokens, parents and scores as decoding drafts after that very prefix."""
    target, draft, prompts = trained
    assert compare_trees(target, draft, prompts[:1]) >= 3


def test_training_time_logits_equal_decode_time_logits_for_every_unrolled_step(trained):
    """Feed the text as a chain of nodes to the decoder's draft and compare with the unrolled training pass."""
    target, draft, prompts = trained
    from gto_hf.drafts import DraftPrefix, NodeSteps

    ids = target.generate(
        prompts[:1], attention_mask=torch.ones_like(prompts[:1]), max_new_tokens=20, eos_token_id=None, do_sample=False
    )
    with torch.no_grad():
        layers = list(draft.config.feature_layers)
        reading = read_target(target, ids, torch.ones_like(ids), layers, 0, 1, use_cache=False)
        t, steps = 12, 6
        trained_logits = SequencePrefix(draft, reading.sequences).unrolled_logits(torch.tensor([[t]]), steps)
        # decoding: the prompt first, then accepted tokens in two reads, then nodes
        prefix, features = DraftPrefix(draft), reading.sequences.features
        for a, b in ((0, 6), (6, 9), (9, t)):
            out = prefix.extend(features[:, a:b], ids[:, a + 1 : b + 1], torch.arange(a, b)[None])
        nodes = NodeSteps(prefix, torch.tensor([t - 1]), prefix.valid)
        feature = out[:, -1:]
        for k in range(steps):
            torch.testing.assert_close(draft.head(feature)[0, 0], trained_logits[k][0, 0], atol=1e-4, rtol=1e-4)
            ancestors = torch.ones(1, 1, k + 1, dtype=torch.bool)
            feature = nodes.forward(ids[:, t + 1 + k, None], feature, ancestors, k + 1)


# ---------------------------------------------------------------- losses and gradients
def naive_losses(target, draft, reference, batch, rows, plan, groups, steps, decay):
    """(token loss, roots, gto loss) with gradient, by plain loops."""
    embedding = target.get_input_embeddings().weight.detach()
    naive, ref = NaiveEagle3(draft, embedding), NaiveEagle3(reference, embedding)
    layers = list(draft.config.feature_layers)
    tokens_total, roots_total, gto_total = 0.0, 0, 0.0
    for b, row in enumerate(rows):
        with torch.no_grad():
            states = target(torch.tensor([row]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i][0] for i in layers], -1)
        supervised = {p for p in range(3, len(row)) if row[p - 1] != EOS}
        loss, roots = naive_gto.token_loss(
            naive, target, features, row, supervised, draft.kept_ids.tolist(), steps, decay, 64
        )
        tokens_total, roots_total = tokens_total + loss, roots_total + roots
        for g in range(groups.shape[1]):
            number = b * groups.shape[1] + g
            mine, theirs, lengths = [], [], []
            for i, t in enumerate(groups[b, g].tolist()):
                n = number * groups.shape[2] + i
                path = plan.paths[n, : plan.lengths[n]].tolist()
                mine.append(naive_gto.path_log_prob(naive, features[:t], row[: t + 1], path))
                with torch.no_grad():
                    theirs.append(naive_gto.path_log_prob(ref, features[:t], row[: t + 1], path))
                lengths.append(len(path))
            gto_total = gto_total + naive_gto.group_loss(mine, theirs, lengths, plan.advantages[number], 0.2)
    return tokens_total, roots_total, gto_total


def fast_losses(target, draft, reference, batch, steps, decay, plan_args=None, elements=2**26):
    ids, mask, labels = batch
    plan, reading, groups, valid = plan_for(target, draft, reference, batch, **(plan_args or {}))
    targets = supervised_targets(labels, ids, EOS_IDS)
    roots = roots_of(targets)
    order, real = padded_positions(roots)
    supervised = supervised_steps(targets, order, steps) & real[..., None]

    def of_tokens(features):
        return token_loss(draft, features, reading.readout, order, supervised, decay, elements=elements)

    tokens, path_log_probs = draft_forward(draft, reading.sequences, order, steps, of_tokens, plan.path_log_probs)
    grouped = gto_loss(path_log_probs, plan.reference_log_probs, plan.of_groups(plan.lengths), plan.advantages)
    return tokens, grouped, plan, groups


@pytest.mark.parametrize("positions", [1, 4, 1000])
def test_batched_losses_equal_the_naive_loop_in_value_and_gradient(llama, rows, positions):
    """Whatever number of positions has its logits at a time."""
    reference = tiny_draft(llama)
    draft = perturbed(reference, 0.02)
    batch = batch_of(llama, rows)
    tokens, grouped, plan, groups = fast_losses(
        llama, draft, reference, batch, 3, 0.8, elements=positions * 3 * len(draft.kept_ids)
    )
    assert plan.lengths.sum() > 0
    expected_tokens, roots, expected_gto = naive_losses(llama, draft, reference, batch, rows, plan, groups, 3, 0.8)
    assert int(tokens.counted[0]) == roots
    torch.testing.assert_close(tokens.loss, expected_tokens, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(grouped.loss, expected_gto, atol=1e-4, rtol=1e-4)
    for fast, slow in ((tokens.loss, expected_tokens), (grouped.loss, expected_gto)):
        mine = torch.autograd.grad(fast, list(draft.parameters()), retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(slow, list(draft.parameters()), retain_graph=True, allow_unused=True)
        for (name, _), a, b in zip(draft.named_parameters(), mine, theirs, strict=True):
            assert a is not None and a.abs().sum() > 0, name
            scale = b.abs().max()
            torch.testing.assert_close(a / scale, b / scale, atol=2e-4, rtol=1e-3, msg=name)


def test_the_gradient_matches_finite_differences_in_float64_through_path_and_prefix(llama, rows):
    target = llama.double()
    reference = tiny_draft(llama).double()
    draft = perturbed(reference, 0.02)
    batch = batch_of(target, rows[:2])
    _, grouped, plan, _ = fast_losses(target, draft, reference, batch, 2, 0.8)
    ids, mask, labels = batch
    layers = list(draft.config.feature_layers)
    sequences = read_target(target, ids, mask, layers, 0, 1, use_cache=False).sequences
    token_roots = torch.tensor([[4, 7], [5, 6]])
    weights = [torch.randn(2, 2, 48, dtype=torch.float64) for _ in range(2)]

    def loss():
        heads = lambda features: [draft.head(f) for f in features]  # noqa: E731
        logits, paths = draft_forward(draft, sequences, token_roots, 2, heads, plan.path_log_probs)
        surrogate = gto_loss(paths, plan.reference_log_probs, plan.of_groups(plan.lengths), plan.advantages, 0.9)
        return surrogate.loss + sum((w * x.log_softmax(-1)).sum() for w, x in zip(weights, logits, strict=True))

    assert loss().dtype == torch.float64
    grads = torch.autograd.grad(loss(), list(draft.parameters()))
    torch.manual_seed(0)
    for (name, p), grad in zip(draft.named_parameters(), grads, strict=True):
        direction = torch.randn_like(p)
        step = 1e-6
        with torch.no_grad():
            p.add_(direction, alpha=step)
            above = loss()
            p.add_(direction, alpha=-2 * step)
            below = loss()
            p.add_(direction, alpha=step)
        numeric, analytic = (above - below) / (2 * step), (grad * direction).sum()
        assert analytic.abs() > 1e-9, name
        torch.testing.assert_close(analytic, numeric, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_reference_the_ratio_is_one_and_the_gradient_zero(llama, rows, dtype):
    target = llama.to(dtype)
    reference = tiny_draft(llama)
    draft = copy.deepcopy(reference).train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, grouped, plan, _ = fast_losses(target, draft, reference, batch_of(target, rows), 3, 0.8)
    assert plan.lengths.sum() > 0
    assert (grouped.ratio == 1).all() and (plan.advantages == 0).all()
    grads = torch.autograd.grad(grouped.loss, list(draft.parameters()), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in grads)
    moved = perturbed(draft, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, grouped, plan, _ = fast_losses(target, moved, reference, batch_of(target, rows), 3, 0.8)
    assert not (grouped.ratio == 1).all() and plan.advantages.abs().sum() > 0
    grads = torch.autograd.grad(grouped.loss, list(moved.parameters()), allow_unused=True)
    assert sum(g.abs().sum() for g in grads if g is not None) > 0


def test_scores_do_not_depend_on_how_many_trees_share_a_forward(llama, rows):
    reference = tiny_draft(llama)
    draft, batch = perturbed(reference), batch_of(llama, rows)
    ids, mask, _ = batch
    plans = []
    for max_nodes in (1, 17, 10_000):
        groups = torch.tensor([[[3, 4], [6, 7]]] * 3)
        reading = read_target(llama, ids, mask, list(draft.config.feature_layers), 0, ids.shape[1], use_cache=True)
        plans.append(
            plan_groups(
                draft,
                reference,
                reading.sequences,
                groups,
                torch.ones(3, 2).bool(),
                TREE,
                llama,
                reading.cache,
                reading.readout,
                EOS_IDS,
                max_nodes=max_nodes,
            )  # fmt: skip
        )
    for plan in plans[1:]:
        torch.testing.assert_close(plan.rewards, plans[0].rewards, atol=1e-5, rtol=1e-5)
        assert torch.equal(plan.paths, plans[0].paths) and plan.target_nodes == plans[0].target_nodes


def test_eager_attention_gives_the_same_plan(llama, rows):
    reference = tiny_draft(llama)
    draft, batch = perturbed(reference), batch_of(llama, rows)
    a, *_ = plan_for(llama, draft, reference, batch)
    llama.set_attn_implementation("eager")
    b, *_ = plan_for(llama, draft, reference, batch)
    torch.testing.assert_close(a.rewards, b.rewards, atol=1e-4, rtol=1e-4)
    assert torch.equal(a.lengths, b.lengths)


def test_nothing_below_end_of_sequence_is_accepted(llama, rows):
    draft = tiny_draft(llama)
    batch = batch_of(llama, rows)
    plan, reading, groups, _ = plan_for(llama, draft, draft, batch)
    with torch.no_grad():
        trees = SequencePrefix(draft, reading.sequences).grow(groups.flatten(1), TREE)
    inner = int(trees.tokens.gather(1, trees.parents)[:, 1:][trees.parents[:, 1:] > 0].mode().values)
    from gto_hf.gto import score_trees

    roots = groups.flatten(1)
    (scores,), *_ = score_trees(
        llama, reading.cache, [trees], roots, reading.sequences, reading.readout, torch.tensor([inner])
    )
    ended = trees.tokens == inner
    below = ended.gather(1, trees.parents)
    below[:, 0] = False
    assert below.any()
    assert (scores.node_log_probs[below] == -torch.inf).all() and (scores.choices[ended] == -1).all()


def test_ranks_agree_on_the_number_of_forwards_before_the_first(llama, rows):
    """A target that is split over ranks forwards together or not at all: asking in between would wait for ever."""
    from gto_hf.gto import score_trees

    reference = tiny_draft(llama)
    draft, batch = perturbed(reference), batch_of(llama, rows)
    _, reading, groups, _ = plan_for(llama, draft, reference, batch)
    roots = groups.flatten(1)
    with torch.no_grad():
        trees = SequencePrefix(draft, reading.sequences).grow(roots, TREE)
    forwards, asked = [], []
    hook = llama.register_forward_pre_hook(lambda *_: forwards.append(1))

    def another_rank_has_more(number):
        asked.append((number, len(forwards)))
        return number + 2

    (scores,), *_ = score_trees(
        llama, reading.cache, [trees], roots, reading.sequences, reading.readout, EOS_IDS, max_nodes=2,
        largest=another_rank_has_more,
    )  # fmt: skip
    hook.remove()
    ((own, before),) = asked
    assert before == 0 and own > 1 and len(forwards) == own + 2
    (alone,), *_ = score_trees(llama, reading.cache, [trees], roots, reading.sequences, reading.readout, EOS_IDS)
    torch.testing.assert_close(scores.node_log_probs, alone.node_log_probs, atol=1e-5, rtol=1e-5)


def test_only_distinct_inner_nodes_off_the_text_are_forwarded(llama, rows):
    """Counted by hand: leaves, nodes of equal path, and nodes that are the text itself cost nothing."""
    reference = tiny_draft(llama)
    draft, batch = perturbed(reference), batch_of(llama, rows)
    groups = torch.tensor([[[3, 4, 5], [6, 7, 8]]] * 3)
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    plan, reading, *_ = plan_for(llama, draft, reference, batch, groups=groups, valid=valid)
    inner = set()
    with torch.no_grad():
        for model in (draft, reference):
            trees = SequencePrefix(model, reading.sequences).grow(groups.flatten(1), TREE)
            for n in valid.flatten().repeat_interleave(3).nonzero()[:, 0].tolist():
                b, root = n // 6, int(groups.flatten(1)[n // 6, n % 6])
                parents = trees.parents[n].tolist()
                for node in set(parents[1:]) - {0}:
                    path, at = [], node
                    while at:
                        path.insert(0, int(trees.tokens[n, at]))
                        at = parents[at]
                    inner.add((b, (*rows[b][: root + 1], *path)))
    text = {(b, tuple(row[:n])) for b, row in enumerate(rows) for n in range(1, len(row) + 1)}
    assert plan.target_nodes == len(inner - text) > 0
    assert plan.tree_nodes == 2 * 15 * TREE.total_tokens > 3 * plan.target_nodes
