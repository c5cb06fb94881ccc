# SPDX-License-Identifier: Apache-2.0
"""Every spelling of EAGLE-3: loaded logits equal a plain reading of the file, and decoding with it is lossless."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gto_hf import AutoDraft, DraftCheckpointError
from gto_hf.gto import SequencePrefix
from tests.checkpoints.dialect_files import LLAMA, SPELLINGS, VD, VOCAB, facts, weights
from tests.drafts.test_eagle3 import sequences
from tests.reference.naive_eagle3 import NaiveEagle3, PathModel
from tests.reference.naive_tree import naive_tree
from tests.tiny import TREE, tiny_target


GOLDEN = Path(__file__).parents[1] / "golden" / "dialects"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def load(spelling, folder, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoDraft.from_pretrained(spelling.write(folder), **{**spelling.said, **kwargs})


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_files_are_those_on_record(name):
    path = GOLDEN / f"{name}.json"
    found = SPELLINGS[name].listing()
    if os.environ.get("GTO_HF_WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))


@pytest.mark.parametrize("name", SPELLINGS)
def test_logits_and_trees_equal_a_plain_reading_of_the_file(target, tmp_path, name):
    spelling = SPELLINGS[name]
    made = weights(spelling.facts)
    draft = load(spelling, tmp_path, target=target)
    config = draft.config
    assert config.source["dialect"] == spelling.dialect and config.feature_layers == spelling.facts.feature_layers
    assert torch.equal(draft.kept_ids, made["d2t"] + torch.arange(VD))  # in the order of the head's rows
    assert not config.tie_word_embeddings and config.own_embeddings == spelling.facts.own_embeddings
    embedding = made.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    naive = NaiveEagle3.of_tensors(made, spelling.facts, made["d2t"], embedding)
    ids = torch.randint(3, VOCAB, (1, 12))
    batch, row = sequences(target, draft, ids), ids[0].tolist()
    with torch.no_grad():
        prefix = SequencePrefix(draft, batch)
        expected = naive.logits(batch.features[0, :8], row[:9], row[9:11])
        for a, b in zip(prefix.unrolled_logits(torch.tensor([[8]]), 3), expected, strict=True):
            torch.testing.assert_close(a[0, 0], b, atol=1e-3, rtol=1e-4)
        tree = prefix.grow(torch.tensor([[8]]), TREE)
        model = PathModel(naive, batch.features[0, :8], row[:9])
        proposals = naive_tree(model, 0, row[8], TREE.depth, TREE.top_k, TREE.total_tokens)
    assert tree.tokens[0].tolist() == proposals["tokens"] and tree.parents[0].tolist() == proposals["parents"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_decoding_with_it_is_lossless_and_it_saves_in_our_format(target, tmp_path, name):
    draft = load(SPELLINGS[name], tmp_path / "theirs", target=target)
    draft.save_pretrained(tmp_path / "ours")
    again = AutoDraft.from_pretrained(tmp_path / "ours", target=target)
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in draft.state_dict().items())
    assert again.config.source == draft.config.source and str(tmp_path) not in json.dumps(again.config.source)
    prompt = torch.randint(3, VOCAB, (1, 6))
    kwargs = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
    }
    assert torch.equal(target.generate(prompt, assistant_model=again, **kwargs), target.generate(prompt, **kwargs))


# ---------------------------------------------------------------- what is decided, and what is asked
def decisions(name, folder, target, **kwargs):
    return " | ".join(load(SPELLINGS[name], folder, target=target, **kwargs).config.source["decisions"])


@pytest.mark.parametrize(
    "name, words",
    [
        ("safeailab", "EAGLE-3's rule"),
        ("safeailab_narrow", "`rope_theta=500000` is ignored"),
        ("specforge_hf", "norm_output=True: the caller's"),
        ("specforge_sglang", "[1, 3, 4, 6] are layers whose output is meant: feature layers [2, 4, 5, 7]"),
        ("speculators_0", "`norm_before_residual` is not stated: true"),
        ("speculators_1", "[1, 3, 6] are `hidden_states` indices"),
        ("speculators_1", "written by speculators 1.0.0"),
        ("modelopt", "yarn scaling by 32 is the exporter's"),
        ("modelopt", "`hidden_norm` alone"),
        ("angelslim_old", "`rope_theta=1e+06` is ignored"),
        ("angelslim_new", "[2, 3, 7] are `hidden_states` indices"),
        ("automodel", "`num_hidden_layers=8` is the target's"),
        ("sglang_old_norms", "base 10,000"),
    ],
)
def test_decisions_are_on_record(target, tmp_path, name, words):
    assert words in decisions(name, tmp_path, target)


def test_doubtful_decisions_warn(target, tmp_path):
    SPELLINGS["speculators_0"].write(tmp_path)
    with pytest.warns(UserWarning, match="norm_before_residual"):
        AutoDraft.from_pretrained(tmp_path, target=target)
    # ids of the output kind that look like a copy of the other kind
    spelling = SPELLINGS["sglang"]
    config = json.loads(json.dumps(spelling.config))
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    spelling.write(tmp_path / "copied", config=config)
    with pytest.warns(UserWarning, match="hidden_states"):
        draft = AutoDraft.from_pretrained(tmp_path / "copied", target=target)
    assert draft.config.feature_layers == [3, 5, 6]
    assert AutoDraft.from_pretrained(tmp_path / "copied", feature_layers=[2, 4, 5]).config.feature_layers == [2, 4, 5]


def test_the_meaning_of_specforges_norm_output_is_asked_for(target, tmp_path):
    SPELLINGS["specforge_hf"].write(tmp_path)
    with pytest.raises(
        DraftCheckpointError, match=r"Pass `norm_output=False`.*September 2026|September 2026.*norm_output"
    ):
        AutoDraft.from_pretrained(tmp_path, target=target)
    for said in (True, False):
        assert AutoDraft.from_pretrained(tmp_path, target=target, norm_output=said).config.norm_output is said


def test_a_modelopt_head_without_ids_is_not_given_the_rule(target, tmp_path):
    spelling = SPELLINGS["modelopt"]
    config = json.loads(json.dumps(spelling.config))
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = None
    spelling.write(tmp_path, config=config)
    with pytest.raises(DraftCheckpointError, match="feature_layers="):
        AutoDraft.from_pretrained(tmp_path, target=target)
    assert AutoDraft.from_pretrained(tmp_path, target=target, feature_layers=[1, 4, 6]).config.feature_layers == [
        1,
        4,
        6,
    ]


def test_angelslims_two_lists_must_agree(target, tmp_path):
    spelling = SPELLINGS["angelslim_new"]
    spelling.write(tmp_path, config=spelling.config | {"aux_hidden_state_layer_ids": [1, 2, 5]})
    with pytest.raises(DraftCheckpointError, match=r"\[1, 2, 5\]"):
        AutoDraft.from_pretrained(tmp_path, target=target)


# Spellings whose own projects do not have the field.
@pytest.mark.parametrize("name", ["safeailab", "specforge_sglang", "sglang", "modelopt", "angelslim_old", "automodel"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_normed_residual_that_is_stated_anywhere_is_taken(tmp_path, name, nested):
    spelling = SPELLINGS[name]
    spelling.write(tmp_path, config=stating(spelling.config, "norm_before_residual", True, nested))
    with pytest.warns(UserWarning, match="norm_before_residual=True"):
        draft = AutoDraft.from_pretrained(tmp_path, feature_layers=spelling.facts.feature_layers)
    assert draft.midlayer.norm_before_residual


@pytest.mark.parametrize("name", ["safeailab", "modelopt", "angelslim_old"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_normed_output_that_a_project_does_not_have_is_asked_for(tmp_path, name, nested):
    spelling = SPELLINGS[name]
    spelling.write(tmp_path, config=stating(spelling.config, "norm_output", True, nested))
    layers = spelling.facts.feature_layers
    with pytest.raises(DraftCheckpointError, match="norm_output=True.*Pass"):
        AutoDraft.from_pretrained(tmp_path, feature_layers=layers)
    for said in (True, False):
        draft = AutoDraft.from_pretrained(tmp_path, feature_layers=layers, norm_output=said)
        assert draft.config.norm_output is said


def test_flags_may_stand_in_either_place_but_not_differ(tmp_path):
    spelling = SPELLINGS["sglang"]
    config = {k: v for k, v in spelling.config.items() if k != "norm_output"}
    spelling.write(tmp_path / "nested", config=stating(config, "norm_output", True, nested=True))
    assert AutoDraft.from_pretrained(tmp_path / "nested").config.norm_output
    spelling.write(tmp_path / "both", config=stating(spelling.config, "norm_output", False, nested=True))
    with pytest.raises(DraftCheckpointError, match="`norm_output` twice"):
        AutoDraft.from_pretrained(tmp_path / "both")
    spelling.write(tmp_path / "word", config=config | {"norm_output": "false"})
    with pytest.raises(DraftCheckpointError, match="norm_output='false'"):
        AutoDraft.from_pretrained(tmp_path / "word")
    spelling.write(tmp_path / "lie", config=stating(spelling.config, "fc_norm", True, nested=True))
    with pytest.raises(DraftCheckpointError, match="fc_norm=True"):
        AutoDraft.from_pretrained(tmp_path / "lie")


@pytest.mark.parametrize("name, field", [
    ("safeailab", "eagle_aux_hidden_state_layer_ids"),
    ("angelslim_old", "aux_layer_ids"),
    ("modelopt", "eagle_aux_hidden_state_layer_ids"),
    ("specforge_hf", "eagle_aux_hidden_state_layer_ids"),
])  # fmt: skip
def test_layer_ids_where_a_project_does_not_write_them_are_not_passed_over(target, tmp_path, name, field):
    spelling = SPELLINGS[name]
    config = {k: v for k, v in spelling.config.items() if k != "eagle_config"} | {field: [1, 3, 6]}
    if name in ("modelopt", "specforge_hf"):
        config["eagle_config"] = {"use_aux_hidden_state": True}
    spelling.write(tmp_path, config=config)
    with pytest.raises(DraftCheckpointError, match=rf"{field}=\[1, 3, 6\].*feature_layers="):
        AutoDraft.from_pretrained(tmp_path, target=target, **spelling.said)  # EAGLE-3's rule would say [2, 4, 5]
    draft = AutoDraft.from_pretrained(tmp_path, target=target, feature_layers=[2, 4, 7], **spelling.said)
    assert draft.config.feature_layers == [2, 4, 7]


def test_two_lists_of_layers_must_be_one_in_some_numbering(tmp_path):
    spelling = SPELLINGS["sglang"]  # reads output ids [1, 3, 4] in `eagle_config`
    config = {k: v for k, v in spelling.config.items() if k != "norm_output"}
    spelling.write(tmp_path / "same", config=config | {"aux_hidden_state_layer_ids": [2, 4, 5]})
    assert AutoDraft.from_pretrained(tmp_path / "same").config.feature_layers == [2, 4, 5]
    spelling.write(tmp_path / "other", config=config | {"aux_hidden_state_layer_ids": [2, 4, 6]})
    with pytest.raises(DraftCheckpointError, match=r"\[2, 4, 6\].*\[2, 4, 5\]"):
        AutoDraft.from_pretrained(tmp_path / "other")


@pytest.mark.parametrize("stated", [
    {"rope_scaling": {"type": "spiral", "factor": 2}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    {"rope_parameters": None, "rope_scaling": "yarn"},
])  # fmt: skip
def test_rotary_parameters_that_are_said_stand_in_for_ones_that_cannot_be_read(tmp_path, stated):
    spelling = SPELLINGS["sglang"]
    spelling.write(tmp_path, config=spelling.config | stated)
    with pytest.raises(DraftCheckpointError, match="rotary parameters|rope_type"):
        AutoDraft.from_pretrained(tmp_path)
    draft = AutoDraft.from_pretrained(tmp_path, rope_parameters={"type": "linear", "factor": 2.0})
    assert draft.config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(DraftCheckpointError, match="`rope_parameters=`.*spiral"):
        AutoDraft.from_pretrained(tmp_path, rope_parameters={"rope_type": "spiral"})


def stating(config, field, value, nested):
    """A config that says one thing more, at its top or in `eagle_config`."""
    if not nested:
        return config | {field: value}
    return config | {"eagle_config": (config.get("eagle_config") or {}) | {field: value}}


def test_arguments_that_decide_nothing_are_refused(target, tmp_path):
    draft = load(SPELLINGS["safeailab"], tmp_path / "theirs", target=target)
    draft.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="norm_output"):
        AutoDraft.from_pretrained(tmp_path / "ours", norm_output=True)


@pytest.mark.parametrize("layer, window", [
    ({"sliding_window": 4, "use_sliding_window": False}, None),
    ({"sliding_window": 4}, 4),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 28}, None),
    ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, 4),
    ({"sliding_window": 4, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, 4),
])  # fmt: skip
def test_windows_follow_the_rules_of_transformers(tmp_path, layer, window):
    spelling = SPELLINGS["speculators_0"]
    config = json.loads(json.dumps(spelling.config)) | {"norm_before_residual": True}
    config["transformer_layer_config"] |= layer
    spelling.write(tmp_path, config=config)
    assert AutoDraft.from_pretrained(tmp_path, feature_layers=[2, 4, 5]).config.sliding_window == window


def test_multimodal_rotary_sections_are_the_default_on_text(tmp_path):
    spelling = SPELLINGS["specforge_sglang"]
    config = {k: v for k, v in spelling.config.items() if k != "partial_rotary_factor"}
    config["rope_scaling"] = {"rope_type": "mrope", "mrope_section": [1, 1, 2]}
    spelling.write(tmp_path, config=config)
    rope = AutoDraft.from_pretrained(tmp_path).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1e6}


# ---------------------------------------------------------------- storage
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_one_checkpoint(target, tmp_path, kind):
    content = weights(facts())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"draft_vocab_size": VD}))
    names = sorted(content)
    stem, ending = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    places = {name: f"{stem}-0000{1 + i % 2}-of-00002.{ending}" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: content[name] for name in names if places[name] == file}
        save_file(part, tmp_path / file) if kind == "safetensors" else torch.save(part, tmp_path / file)
    index = tmp_path / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    state = AutoDraft.from_pretrained(tmp_path, target=target).state_dict()
    assert all(torch.equal(state[name], content[name]) for name in names)
    for change, words in (
        ({**places, "norm.weight": "../elsewhere"}, "no file beside it"),
        ({**places, names[0]: f"{stem}-00000.{ending}"}, "no such file"),
        ({**places, "more.weight": places["norm.weight"]}, "more.weight"),
        ({k: v for k, v in places.items() if k != "norm.weight"}, "norm.weight"),
    ):
        index.write_text(json.dumps({"weight_map": change}))
        with pytest.raises(DraftCheckpointError, match=words):
            AutoDraft.from_pretrained(tmp_path, target=target)
    index.write_text("[]")
    with pytest.raises(DraftCheckpointError, match="weight_map"):
        AutoDraft.from_pretrained(tmp_path, target=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_the_files(target, tmp_path, dtype):
    spelling = SPELLINGS["automodel"]
    made = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights(spelling.facts).items()}
    made["norm.weight"] = made["norm.weight"].float()  # one of them may be stored wider
    draft = AutoDraft.from_pretrained(spelling.write(tmp_path, made), target=target)
    assert draft.dtype == dtype and {p.dtype for p in draft.parameters()} == {dtype}
    assert any("dtypes" in decision for decision in draft.config.source["decisions"])
    assert draft.d2t.dtype == torch.long and draft.t2d.dtype == torch.bool


def test_a_tied_head_is_a_copy_of_its_own(target, tmp_path):
    spelling = SPELLINGS["sglang"]
    made = weights(facts(norm_output=True, biases=("fc",), own_embeddings=True))
    for name in ("lm_head.weight", "d2t", "t2d"):
        del made[name]
    config = {k: v for k, v in spelling.config.items() if k != "draft_vocab_size"} | {"tie_word_embeddings": True}
    draft = AutoDraft.from_pretrained(spelling.write(tmp_path, made, config), target=target)
    assert torch.equal(draft.lm_head.weight, draft.embed_tokens.weight) and not draft.config.tie_word_embeddings
    assert draft.lm_head.weight.data_ptr() != draft.embed_tokens.weight.data_ptr()


def test_buffers_that_old_versions_saved_are_left_out_by_name(target, tmp_path):
    spelling = SPELLINGS["safeailab"]
    made = weights(spelling.facts) | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    draft = AutoDraft.from_pretrained(spelling.write(tmp_path, made), target=target)
    assert any("inv_freq" in decision for decision in draft.config.source["decisions"])
