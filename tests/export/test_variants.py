# SPDX-License-Identifier: Apache-2.0
"""Every option of an EAGLE-3 draft, out through the engines that have it and in again."""

import pytest
import torch
from safetensors.torch import load_file

from gto_hf import AutoDraft, Eagle3Draft
from gto_hf.drafts import EagleDraft, GriffinDraft
from gto_hf.export import ENGINES, check_exportable, export
from tests.export.test_export import first_logits
from tests.tiny import TREE, VOCAB, tiny_target


VARIANTS = {
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "eagle 3.1": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "qk_norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "attention_output_bias": True},
    "layers": {"num_hidden_layers": 2},
    "window": {"sliding_window": 3},
    "two features": {"feature_layers": [3, 6]},
    "four features": {"feature_layers": [1, 3, 5, 7]},
    "head_dim": {"head_dim": 16},
    "narrow": {"hidden_size": 16, "head_dim": 4, "own_embeddings": True},
}
SGLANG = {"norm_before_fc", "fc_norm", "norm_output", "two features", "four features", "head_dim", "narrow"}
CASES = [(engine, name) for engine in ("vllm", "speculators") for name in VARIANTS]
CASES += [("sglang", name) for name in VARIANTS if name in SGLANG]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def variant(target, name, **fields):
    """A draft with an option, every number of it random, so that each one counts."""
    torch.manual_seed(3)
    draft = Eagle3Draft.from_target(
        target,
        draft_vocab_size=48,
        token_counts=torch.arange(VOCAB, 0, -1),
        tree=TREE,
        init="random",
        **VARIANTS.get(name, {}),
        **fields,
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0.0 if parameter.ndim == 2 else 1.0, 0.3)
    return draft.eval()


@pytest.mark.parametrize("engine, name", CASES)
def test_read_write_read_keeps_every_option(tmp_path, target, engine, name):
    draft = variant(target, name)
    export(draft, tmp_path, engine, target=target, target_name="org/tiny")
    again = AutoDraft.from_pretrained(tmp_path, target=target)
    for field, value in VARIANTS[name].items():
        assert getattr(again.config, field) == value, field
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = first_logits(draft, target, ids)
    assert torch.isfinite(expected[..., draft.kept_ids]).all()
    assert torch.equal(first_logits(again, target, ids), expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_the_rotary_base_survives_every_layout(tmp_path, target, engine, rope):
    draft = variant(target, "plain", rope_parameters={**rope, "rope_theta": 500.0})
    export(draft, tmp_path, engine, target=target, target_name="org/tiny")
    again = AutoDraft.from_pretrained(tmp_path, target=target)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(first_logits(again, target, ids), first_logits(draft, target, ids))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SGLANG])
def test_options_that_sglang_lacks_are_refused(tmp_path, target, name):
    with pytest.raises(ValueError, match="cannot be exported to sglang"):
        export(variant(target, name), tmp_path / "out", "sglang", target=target)
    assert not (tmp_path / "out").exists()


def test_a_normed_output_is_not_written_under_specforges_name_of_the_layer(tmp_path, target):
    export(variant(target, "norm_output"), tmp_path, "sglang", target=target)
    assert not any(key.startswith("midlayer.") for key in load_file(tmp_path / "model.safetensors"))


def last_feature_logits(draft, target, ids):
    """Logits after every pair, and of a second unrolled step, from the target's last hidden states."""
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
        places = torch.arange(hidden.shape[1])[None]
        mask = torch.ones(1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        output = draft(ids[:, 1:], draft.fuse(hidden), places, None, mask)
        again = draft(ids[:, 1:], output.features, places, None, mask)
        return torch.stack([draft.head(output.features), draft.head(again.features)])


@pytest.mark.parametrize(
    "engine, cls, fields",
    [
        ("safeailab", EagleDraft, {"fc_bias": True}),
        ("safeailab", EagleDraft, {"fc_bias": False, "attention_bias": True}),
        ("safeailab", GriffinDraft, {}),
        ("vllm", EagleDraft, {}),
        ("sglang", EagleDraft, {"fc_bias": True}),
    ],
)
def test_drafts_of_the_last_feature_go_out_and_in(tmp_path, target, engine, cls, fields):
    torch.manual_seed(4)
    draft = cls.from_target(target, tree=TREE, init="random", **fields).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0.0 if parameter.ndim == 2 else 1.0, 0.3)
    made = export(draft, tmp_path, engine, target=target, target_name="org/tiny")
    again = AutoDraft.from_pretrained(tmp_path, target=target)
    assert type(again) is cls and made.commands
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(last_feature_logits(again, target, ids), last_feature_logits(draft, target, ids))
    stored = {"safeailab"} & {engine}
    names = set(
        torch.load(tmp_path / "pytorch_model.bin")
        if cls is GriffinDraft
        else load_file(tmp_path / "model.safetensors")
    )
    assert ("embed_tokens.weight" in names) == bool(stored) and not {"d2t", "t2d", "lm_head.weight"} & names


def test_sglang_always_loads_a_bias_of_an_eagle_drafts_fc(tmp_path, target):
    draft = EagleDraft.from_target(target, tree=TREE)
    export(draft, tmp_path, "sglang", target=target)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["fc.bias"], torch.zeros(32))


@pytest.mark.parametrize(
    "engine, cls, fields, words",
    [
        ("vllm", EagleDraft, {"fc_bias": True}, "fc_bias"),
        ("sglang", EagleDraft, {"attention_bias": True}, "attention_bias"),
        ("safeailab", EagleDraft, {"layernorms": True}, "layernorms"),
        ("speculators", EagleDraft, {}, "cannot load a draft of type `eagle`"),
        ("vllm", GriffinDraft, {}, "only safeailab can"),
    ],
)
def test_what_the_engines_cannot_say_of_them_is_refused(tmp_path, target, engine, cls, fields, words):
    with pytest.raises(ValueError, match=words):
        export(cls.from_target(target, tree=TREE, **fields), tmp_path / "out", engine, target=target)
    counts = torch.arange(VOCAB, 0, -1)
    if engine == "vllm" and cls is EagleDraft:
        reduced = EagleDraft.from_target(target, tree=TREE, draft_vocab_size=48, token_counts=counts)
        with pytest.raises(ValueError, match="48 of 64 tokens needs a map"):
            check_exportable(reduced.config, engine)  # before it is trained
        with pytest.raises(ValueError, match="48 of 64 tokens needs a map"):
            export(reduced, tmp_path / "out", engine, target=target)
    assert not (tmp_path / "out").exists()
