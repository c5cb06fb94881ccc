# SPDX-License-Identifier: Apache-2.0
"""Drafts on the target's last hidden state: which state that is, whose head reads it, what is refused."""

import copy

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from gto_hf import AutoDraft, DraftConfig
from gto_hf.drafts import DRAFTS, EagleDraft, GriffinDraft
from gto_hf.gto import SequencePrefix, read_target
from gto_hf.target import boundary_features, text_config
from tests.families import FAMILIES
from tests.tiny import TREE, tiny_target


FAMILY_NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "cohere2",
    "granite",
    "gpt2",
    "mixtral",
    "llava",
]


def scaled(name):
    """A family whose logits are more than a product: the borrowed head must know."""
    target = FAMILIES[name].build()
    if name == "granite":
        target.config.logits_scaling = target.logits_scaling = 4.0
    if name == "cohere2":
        target.logit_scale = target.config.logit_scale = 0.5
    return target


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_last_feature_is_what_the_head_reads(name):
    target = scaled(name)
    last = text_config(target).num_hidden_layers
    ids = torch.randint(3, 60, (1, 9))
    draft = EagleDraft.from_target(target, tree=TREE)
    with torch.no_grad():
        alone = target(ids, output_hidden_states=[last]).hidden_states
        output = target(ids, output_hidden_states=True)
        feature = boundary_features(alone, [last])
        assert torch.equal(feature, boundary_features(output.hidden_states, [last]))
        # The draft's own head on the target's feature gives the target's logits: norm, scale and cap included.
        torch.testing.assert_close(draft.head(draft.fuse(feature)), output.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "gemma3"])
@pytest.mark.parametrize("cls", [EagleDraft, GriffinDraft])
def test_targets_that_scale_or_cap_are_decoded_losslessly(name, cls):
    target = scaled(name)
    draft, ids = cls.from_target(target, tree=TREE), torch.randint(3, 60, (1, 8))
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=draft, **kwargs), target.generate(ids, **kwargs))


@pytest.mark.parametrize("cls", [EagleDraft, GriffinDraft])
def test_kept_rows_are_the_rows_of_the_whole_head(cls):
    target = tiny_target()
    torch.manual_seed(1)
    whole = cls.from_target(target, tree=TREE)
    some = cls.from_target(target, tree=TREE, draft_vocab_size=24, token_counts=torch.arange(64))
    some.load_state_dict({k: v for k, v in whole.state_dict().items() if k not in ("d2t", "t2d")}, strict=False)
    outputs = torch.randn(2, 3, 32 * (2 if cls is GriffinDraft else 1))
    torch.testing.assert_close(some.head(outputs), whole.head(outputs)[..., some.kept_ids])


def test_griffin_says_one_half_of_its_output_and_goes_on_with_the_other():
    target = tiny_target()
    draft = GriffinDraft.from_target(target, tree=TREE)
    ids = torch.randint(3, 60, (1, 10))
    sequences = read_target(target, ids, torch.ones_like(ids), [8], 0, 1, use_cache=False).sequences
    roots = torch.tensor([[4]])
    with torch.no_grad():
        before = SequencePrefix(draft, sequences).unrolled(roots, 2)
        changed = copy.deepcopy(draft)
        changed.layers[0].mlp.down_proj.weight[:32] += 0.5  # what the head reads
        after = SequencePrefix(changed, sequences).unrolled(roots, 2)
    assert before[0].shape == (1, 1, 64)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(draft.next_feature(old), changed.next_feature(new))
        assert not torch.allclose(draft.head(old), changed.head(new))


@pytest.mark.parametrize("kind", ["eagle", "griffin"])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 16, "own_embeddings": True}, "hidden_size=16.*target_hidden_size=32"),
        ({"feature_layers": [4, 8]}, r"feature_layers=\[4, 8\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"norm_output": True}, "norm_output"),
        ({"sliding_window": 4}, "sliding_window"),
    ],
)
def test_options_that_it_does_not_have_are_refused(kind, change, words):
    fields = DRAFTS[kind].from_target(tiny_target(), tree=TREE).config.to_dict()
    with pytest.raises(ValueError, match=words):
        DraftConfig(**{**fields, "head_dim": 8, **change})


def test_another_layer_than_the_last_is_refused():
    with pytest.raises(ValueError, match=r"last hidden state.*\[8\].*\[7\]"):
        EagleDraft.from_target(tiny_target(), tree=TREE, feature_layers=[7])


def test_a_reordered_whole_vocabulary_is_refused():
    target = tiny_target()
    draft = EagleDraft.from_target(target, tree=TREE)
    draft.set_vocab(torch.arange(63, -1, -1))
    draft._borrowed.module = None
    with pytest.raises(ValueError, match="d2t"):
        draft.attach(target)


def test_a_target_whose_head_reads_something_else_is_refused():
    config = OPTConfig(
        vocab_size=64, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=8, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="`griffin`.*OPTForCausalLM.*`eagle3`"):
        GriffinDraft.from_target(OPTForCausalLM(config).eval(), tree=TREE)


def test_an_unattached_draft_says_so(tmp_path):
    EagleDraft.from_target(tiny_target(), tree=TREE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head.*attach"):
        AutoDraft.from_pretrained(tmp_path).head(torch.zeros(1, 32))


def test_a_half_precision_draft_reads_a_full_precision_head():
    target = tiny_target()
    draft = EagleDraft.from_target(target, tree=TREE, dtype=torch.bfloat16)
    ids = torch.randint(3, 60, (1, 8))
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=draft, **kwargs), target.generate(ids, **kwargs))
    copied = copy.deepcopy(draft)
    assert copied._borrowed_head is draft._borrowed_head and copied.fc.weight is not draft.fc.weight
