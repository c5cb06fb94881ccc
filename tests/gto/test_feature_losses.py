# SPDX-License-Identifier: Apache-2.0
"""EAGLE's, HASS's and GRIFFIN's token losses: value and gradient against plain loops, and what sets them apart."""

import pytest
import torch

from gto_hf.drafts import EagleDraft, GriffinDraft
from gto_hf.gto import (
    FEATURE_OBJECTIVES,
    FeatureLoss,
    SequencePrefix,
    Sequences,
    aligned_steps,
    feature_token_loss,
    noisy,
    padded_positions,
    read_target,
    roots_of,
    supervised_steps,
    supervised_targets,
    token_loss,
)
from tests.reference.naive_eagle import NaiveEagle
from tests.tiny import EOS, TREE, tiny_target


KINDS = {"eagle": EagleDraft, "griffin": GriffinDraft}
# The recipes at three steps; wide alignment, because a draft that knows nothing would follow no token at all.
RECIPES = {
    "eagle": FEATURE_OBJECTIVES["eagle"],
    "hass": FEATURE_OBJECTIVES["hass"],
    "griffin": FeatureLoss(steps=3, topk_weight=0.5, align_top=25),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target().double()


def make(kind, target, *, vocab=None, **kwargs):
    torch.manual_seed(1)
    counts = None if vocab is None else torch.arange(64, 0, -1)
    draft = KINDS[kind].from_target(
        target, tree=TREE, dtype=torch.float64, draft_vocab_size=vocab, token_counts=counts, **kwargs
    )
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return draft


def naive_of(draft, target, w=None):
    kept = draft.kept_ids
    return NaiveEagle(
        dict(draft.named_parameters()) if w is None else w,
        target.get_input_embeddings().weight,
        lambda hidden: target.lm_head(hidden)[:, kept],
        heads=draft.config.num_attention_heads,
    )


class Batch:
    """Two rows of unequal length, the first three tokens of each are the prompt."""

    def __init__(self, draft, target, steps):
        torch.manual_seed(4)
        ids, mask = torch.randint(3, 60, (2, 12)), torch.ones(2, 12, dtype=torch.long)
        mask[1, 9:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :3] = -100
        targets = supervised_targets(labels, ids, torch.tensor([EOS]), mask)
        self.roots, real = padded_positions(roots_of(targets))
        self.supervised = supervised_steps(targets, self.roots, steps) & real[..., None]
        self.reading = read_target(target, ids, mask, list(draft.config.feature_layers), 0, 12, use_cache=False)
        self.sequences, self.ids = self.reading.sequences, ids


def of(draft, target, recipe, **kwargs):
    batch = Batch(draft, target, recipe.steps)
    outputs = SequencePrefix(draft, batch.sequences).unrolled(batch.roots, recipe.steps, detach=True)
    found = feature_token_loss(
        draft, outputs, batch.reading.readout, batch.roots, batch.supervised, recipe, batch.sequences, **kwargs
    )
    return found, batch


def slow(draft, target, recipe, batch, decay=1.0):
    """The loss root by root and step by step, from the tensors alone."""
    naive, kept = naive_of(draft, target), draft.kept_ids
    total = 0
    for b in range(2):
        ids, features = batch.ids[b].tolist(), batch.sequences.features[b]
        for n, t in enumerate(batch.roots[b].tolist()):
            steps = int(batch.supervised[b, n].sum())
            if steps == 0:
                continue
            outputs = naive.outputs(features[:t], ids[: t + 1], ids[t + 1 : t + steps], detach=True)
            follows = True
            for k, out in enumerate(outputs):
                truth = features[t + k]
                log_q = naive.logits_of(naive.predicted(out)[None])[0].log_softmax(-1)
                p = target.lm_head(truth).softmax(-1)
                some = p[kept] / p[kept].sum()
                loss = torch.zeros((), dtype=torch.float64)
                if int(p.argmax()) in kept.tolist():
                    loss = loss - recipe.token_weight * (some * log_q).sum()
                    best = p[kept].topk(recipe.topk_tokens).indices
                    loss = loss - recipe.topk_weight * (p[kept][best] * log_q[best]).sum()
                gap = (naive.regressed(out) - truth).abs()
                smooth = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
                if follows:
                    total = total + decay**k * (loss + recipe.feature_weight * smooth)
                if recipe.align_top and k + 1 < steps:
                    likeliest = kept[log_q.topk(recipe.align_top).indices].tolist()
                    follows = follows and ids[t + k + 1] in likeliest
    return total


def gradients(loss, draft):
    return torch.autograd.grad(loss, list(draft.parameters()), allow_unused=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("vocab, elements", [(None, 2**20), (40, 100)])
def test_value_and_gradient_equal_a_plain_reference(target, kind, name, vocab, elements):
    draft, recipe = make(kind, target, vocab=vocab), RECIPES[name]
    found, batch = of(draft, target, recipe, elements=elements, decay=0.7)
    expected = slow(draft, target, recipe, batch, decay=0.7)
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    assert found.rows.shape == (2,) and found.counted[0] == batch.supervised[..., 0].sum()
    for mine, other in zip(gradients(found.loss, draft), gradients(expected, draft), strict=True):
        assert mine is not None and float(mine.abs().max()) > 0
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_root_is_a_pass_of_hass_at_one_position(target, kind):
    draft = make(kind, target)
    batch = Batch(draft, target, 3)
    ids, features = batch.ids[0].tolist(), batch.sequences.features[0]
    roots = torch.arange(1, 9)[None].expand(2, -1)
    steps = SequencePrefix(draft, batch.sequences).unrolled(roots, 3, detach=True)
    passes = naive_of(draft, target).passes(features[:-1], ids, 3)
    for k in range(3):
        # root at slot t is pair t - 1, and step k stands k pairs behind it
        torch.testing.assert_close(steps[k][0], passes[k][k : k + 8], atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(torch.stack(steps)[:, 0])
    mine = gradients((torch.stack(steps)[:, 0] * weights).sum(), draft)
    other = gradients(sum((passes[k][k : k + 8] * weights[k]).sum() for k in range(3)), draft)
    for a, b in zip(mine, other, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_differs_from_its_neighbours(target, kind):
    draft = make(kind, target)
    changes = {
        "eagle": FeatureLoss(steps=1),
        "unrolled": FeatureLoss(steps=3),
        "hass": FeatureLoss(steps=3, topk_weight=1.0),
        "half": FeatureLoss(steps=3, topk_weight=0.5),
        "griffin": FeatureLoss(steps=3, topk_weight=0.5, align_top=3),
        "no features": FeatureLoss(steps=3, topk_weight=0.5, align_top=3, feature_weight=0.0),
        "no tokens": FeatureLoss(steps=3, topk_weight=0.5, align_top=3, token_weight=0.0),
    }
    values = {name: float(of(draft, target, recipe)[0].loss) for name, recipe in changes.items()}
    assert len({round(v, 6) for v in values.values()}) == len(changes), values
    assert values["eagle"] < values["unrolled"] < values["half"] < values["hass"]
    assert values["griffin"] < values["half"]


def test_no_gradient_flows_from_a_step_into_the_features_of_the_one_before(target):
    draft = make("eagle", target)
    batch = Batch(draft, target, 2)
    (cut, of_cut), (whole, of_whole) = (
        (steps[1], gradients(steps[1].square().sum(), draft))
        for steps in (
            SequencePrefix(draft, batch.sequences).unrolled(batch.roots, 2, detach=detach) for detach in (True, False)
        )
    )
    assert torch.equal(cut, whole)
    assert any(not torch.allclose(a, b) for a, b in zip(of_cut, of_whole, strict=True))


def test_alignment_ends_a_root_at_the_first_token_that_was_not_drafted(target):
    draft = make("griffin", target)
    batch = Batch(draft, target, 3)
    outputs = SequencePrefix(draft, batch.sequences).unrolled(batch.roots, 3)
    every = aligned_steps(draft, outputs, batch.ids, batch.roots, batch.supervised, 64)
    assert torch.equal(every, batch.supervised)  # every token is among all 64
    some = aligned_steps(draft, outputs, batch.ids, batch.roots, batch.supervised, 25, elements=1)
    assert torch.equal(some[..., 0], batch.supervised[..., 0])  # the root's own step follows nothing
    assert (some[..., 2] <= some[..., 1]).all() and 0 < some[..., 1].sum() < batch.supervised[..., 1].sum()
    for b, n in batch.supervised[..., 1].nonzero().tolist():
        token = batch.ids[b, batch.roots[b, n] + 1]
        best = draft.head(outputs[0][b, n]).topk(25).indices
        assert bool(some[b, n, 1]) == bool((best == token).any())


def test_the_likeliest_tokens_keep_their_probability(target):
    """By hand: p = (.5, .3, .2), K = 2, q uniform: -(.5 + .3) log(1/3), without renormalising .8 to 1."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    recipe = FeatureLoss(token_weight=0.0, topk_weight=1.0, topk_tokens=2)
    found = recipe.of_tokens(torch.zeros(1, 1, 3), p.log(), torch.zeros(1))
    torch.testing.assert_close(found, 0.8 * torch.tensor([[3.0]]).log())


def test_smooth_l1_is_the_mean_over_the_width():
    wanted, predicted = torch.zeros(1, 4), torch.tensor([[[0.5, -2.0, 0.0, 1.0]]])
    expected = torch.tensor([[(0.125 + 1.5 + 0 + 0.5) / 4]])
    torch.testing.assert_close(FeatureLoss().of_features(predicted, wanted), expected)


def test_noise_is_uniform_within_the_width_that_the_row_length_gives():
    valid = torch.ones(2, 64, dtype=torch.bool)
    valid[1, 16:] = False
    features = torch.randn(2, 64, 32)
    clean = Sequences(torch.zeros(2, 64, dtype=torch.long), features, valid, torch.zeros(2, 64, dtype=torch.long))
    assert noisy(clean, 0.0) is clean
    delta = noisy(clean, 0.2).features - features
    for row, length in ((0, 64), (1, 16)):
        half = 0.1 * 512 / length
        assert half * 0.9 < float(delta[row].abs().max()) <= half * 1.001
        assert abs(float(delta[row].mean())) < 0.05 * half
    assert torch.equal(clean.features, features)


@pytest.mark.parametrize("kind", KINDS)
def test_eagle3s_loss_works_on_them_with_gradient_through_the_steps(target, kind):
    draft = make(kind, target)
    batch = Batch(draft, target, 3)
    outputs = SequencePrefix(draft, batch.sequences).unrolled(batch.roots, 3)
    found = token_loss(draft, outputs, batch.reading.readout, batch.roots, batch.supervised)
    naive, expected = naive_of(draft, target), 0
    for b in range(2):
        ids, features = batch.ids[b].tolist(), batch.sequences.features[b]
        for n, t in enumerate(batch.roots[b].tolist()):
            steps = int(batch.supervised[b, n].sum())
            logits = naive.logits(features[:t], ids[: t + 1], ids[t + 1 : t + steps]) if steps else []
            for k, row in enumerate(logits):
                p = target.lm_head(features[t + k]).softmax(-1)
                expected = expected - 0.8**k * (p * row.log_softmax(-1)).sum()
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(gradients(found.loss, draft), gradients(expected, draft), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
