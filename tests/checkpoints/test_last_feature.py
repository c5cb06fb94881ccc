# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1/2, HASS and GRIFFIN checkpoints in every spelling, written by hand from plain tensors, with expected logits."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gto_hf import AutoDraft, DraftCheckpointError
from gto_hf.gto import SequencePrefix
from tests.drafts.test_eagle3 import sequences
from tests.reference.naive_eagle import NaiveEagle
from tests.tiny import TREE, tiny_target


H, V, NH, NKV, HD, INTER = 32, 64, 4, 2, 8, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INTER,
    "num_attention_heads": NH,
    "num_key_value_heads": NKV,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "pad_token_id": 0,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}
LAYER = {
    "self_attn.q_proj.weight": (NH * HD, H),
    "self_attn.k_proj.weight": (NKV * HD, H),
    "self_attn.v_proj.weight": (NKV * HD, H),
    "self_attn.o_proj.weight": (H, NH * HD),
    "mlp.gate_proj.weight": (INTER, H),
    "mlp.up_proj.weight": (INTER, H),
    "mlp.down_proj.weight": (H, INTER),
    "post_attention_layernorm.weight": (H,),
}
BIASES = {
    "self_attn.q_proj.bias": (NH * HD,), "self_attn.k_proj.bias": (NKV * HD,), "self_attn.v_proj.bias": (NKV * HD,)
}  # fmt: skip
FUSION = {
    "fc.fc.weight": (H, 2 * H),
    "fc.fc.bias": (H,),
    "fc.post_attention_layernorm.weight": (H,),
    "fc.mlp.input_layernorm.weight": (H,),
    "fc.mlp.up_proj.weight": (INTER, 2 * H),
    "fc.mlp.down_proj.weight": (H, INTER),
}
# Names of the plain reading, by those of the files.
NORMS = {
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.input_layernorm.weight",
    "lm_head_layernorm.weight": "pre_lm_head_layernorm.weight",
}
LEGACY_NORMS = ("embedding_layernorm.weight", "transformer.input_layernorm.weight", "pre_lm_head_layernorm.weight")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def made(*shapes):
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.3 for part in shapes for name, shape in part.items()}


def under(prefix, shapes):
    return {prefix + name: shape for name, shape in shapes.items()}


def eagle(*, bias=True, qkv=False, norms=False):
    fc = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    layer = under("layers.0.", LAYER | (BIASES if qkv else {}))
    return made(fc, layer, dict.fromkeys(NORMS, (H,)) if norms else {})


def griffin(*, qkv=False):
    layer = LAYER | {"mlp.down_proj.weight": (2 * H, INTER)} | (BIASES if qkv else {})
    return made(FUSION, under("layers.0.", layer))


def legacy(*, bias=False, norms=False):
    fc = {"fusion_fc.weight": (H, 2 * H)} | ({"fusion_fc.bias": (H,)} if bias else {})
    return made(fc, under("transformer.", LAYER), dict.fromkeys(LEGACY_NORMS, (H,)) if norms else {})


def legacy_config(**changes):
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": CONFIG,
        "layernorms": False,
        "fusion_bias": False,
        **changes,
    }


# name: (tensors, config, kind of draft)
SPELLINGS = {
    "eagle": (eagle, CONFIG, "eagle"),
    "eagle without bias": (lambda: eagle(bias=False), CONFIG | {"bias": False, "rope_theta": 500000.0}, "eagle"),
    "eagle of qwen2": (lambda: eagle(qkv=True), CONFIG | {"qkv_bias": True}, "eagle"),
    "eagle whose config is silent": (lambda: eagle(bias=False), CONFIG, "eagle"),
    "hass with norms": (lambda: eagle(norms=True), CONFIG, "eagle"),
    "griffin": (griffin, CONFIG | {"bias": False, "rope_theta": 500000.0}, "griffin"),
    "griffin of qwen2": (lambda: griffin(qkv=True), CONFIG | {"qkv_bias": True}, "griffin"),
    "legacy eagle": (legacy, legacy_config(), "eagle"),
    "legacy hass": (
        lambda: legacy(bias=True, norms=True), legacy_config(layernorms=True, fusion_bias=True), "eagle"
    ),
}  # fmt: skip


def plain(content):
    """Tensors under the names of the plain reading."""
    ours = {}
    for name, tensor in content.items():
        name = NORMS.get(name, name)
        ours[name.replace("fusion_fc.", "fc.").replace("transformer.", "layers.0.")] = tensor
    return ours


def write(folder, content, config=CONFIG, kind="bin"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        save_file(content, folder / "model.safetensors")
    return folder


def theta(config):
    return config.get("transformer_layer_config", config).get("rope_theta", 10000.0)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_logits_equal_a_plain_reading_of_the_tensors(target, tmp_path, name, kind, stored):
    tensors, config, draft_type = SPELLINGS[name]
    content = tensors()
    if stored:
        content |= {"embed_tokens.weight": torch.randn(V, H)}
    draft = AutoDraft.from_pretrained(write(tmp_path, content, config, kind), target=target)
    assert draft.config.draft_type == draft_type and draft.config.feature_layers == [8]
    assert draft.config.own_embeddings == stored and draft.config.rope_parameters["rope_theta"] == theta(config)
    embedding = content["embed_tokens.weight"] if stored else target.get_input_embeddings().weight
    naive = NaiveEagle(plain(content), embedding, target.lm_head, heads=NH, theta=theta(config), eps=1e-5)
    ids = torch.randint(3, V, (1, 12))
    batch = sequences(target, draft, ids)
    with torch.no_grad():
        found = SequencePrefix(draft, batch).unrolled_logits(torch.tensor([[6]]), 3)
        row = ids[0].tolist()
        for a, b in zip(found, naive.logits(batch.features[0, :6], row[:7], row[7:9]), strict=True):
            torch.testing.assert_close(a[0, 0], b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SPELLINGS)
def test_it_decodes_losslessly_and_saves_in_our_format(target, tmp_path, name):
    tensors, config, _ = SPELLINGS[name]
    draft = AutoDraft.from_pretrained(write(tmp_path / "theirs", tensors(), config), target=target)
    draft.tree = TREE
    draft.save_pretrained(tmp_path / "ours")
    again = AutoDraft.from_pretrained(tmp_path / "ours", target=target)
    assert type(again) is type(draft) and again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in draft.state_dict().items())
    prompt = torch.randint(3, V, (1, 5))
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=again, **kwargs), target.generate(prompt, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_copy_of_the_targets_embedding_is_borrowed(target, tmp_path, dtype):
    copied = target.get_input_embeddings().weight.detach().to(dtype)
    content = {name: tensor.to(dtype) for name, tensor in eagle().items()} | {"embed_tokens.weight": copied}
    write(tmp_path / "theirs", content)
    draft = AutoDraft.from_pretrained(tmp_path / "theirs", target=target)
    assert not draft.config.own_embeddings and draft.dtype == dtype and draft.get_input_embeddings() is None
    draft.save_pretrained(tmp_path / "ours")
    assert "embed_tokens.weight" not in AutoDraft.from_pretrained(tmp_path / "ours").state_dict()
    other = AutoDraft.from_pretrained(tmp_path / "theirs", target=tiny_target(seed=1))
    assert torch.equal(other.embed_tokens.weight, copied)  # of another target: its own
    alone = AutoDraft.from_pretrained(tmp_path / "theirs", feature_layers=[8])
    assert torch.equal(alone.embed_tokens.weight, copied)


def test_a_stored_head_of_the_verifier_is_left_out(target, tmp_path):
    content = legacy() | {"lm_head.weight": torch.randn(V, H)}
    draft = AutoDraft.from_pretrained(write(tmp_path, content, legacy_config()), target=target)
    assert not any("lm_head" in name for name in draft.state_dict())
    content["lm_head.weight"] = torch.randn(V + 1, H)
    with pytest.raises(DraftCheckpointError, match="lm_head.weight"):
        AutoDraft.from_pretrained(write(tmp_path, content, legacy_config()), target=target)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_every_missing_or_misshapen_tensor_is_named(tmp_path, name, fault):
    tensors, config, _ = SPELLINGS[name]
    content = tensors()
    for key in content:
        if fault == "missing" and key in ("fc.bias", "fusion_fc.bias"):
            continue  # a file without it is another, complete draft
        changed = dict(content)
        if fault == "missing":
            del changed[key]
        else:
            changed[key] = torch.randn(content[key].shape[0] + 1, *content[key].shape[1:])
        with pytest.raises(DraftCheckpointError) as error:
            AutoDraft.from_pretrained(write(tmp_path, changed, config), feature_layers=[8])
        shown = key.rsplit(".", 2)[-2] + "." + key.rsplit(".", 1)[-1]
        assert key in str(error.value) or shown in str(error.value), (key, str(error.value))


@pytest.mark.parametrize("name", SPELLINGS)
def test_tensors_that_do_not_belong_are_named(tmp_path, name):
    tensors, config, _ = SPELLINGS[name]
    for key in ("layers.0.self_attn.rotary_emb.extra", "transformer.extra.weight", "lm_head.bias", "fc.extra"):
        with pytest.raises(DraftCheckpointError, match=key.replace("layers.0", r"(layers.0|transformer)")):
            AutoDraft.from_pretrained(write(tmp_path, tensors() | {key: torch.ones(2)}, config), feature_layers=[8])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 48}, "hidden_size=48"),
        ({"intermediate_size": 40}, "intermediate_size=40"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
@pytest.mark.parametrize("tensors", [eagle, griffin])
def test_a_config_that_lies_about_sizes_is_refused(tmp_path, tensors, change, words):
    with pytest.raises(DraftCheckpointError, match=words):
        AutoDraft.from_pretrained(write(tmp_path, tensors(), CONFIG | change), feature_layers=[8])


def test_a_stored_embedding_must_have_the_stated_rows(tmp_path):
    content = eagle() | {"embed_tokens.weight": torch.randn(V + 1, H)}
    with pytest.raises(DraftCheckpointError, match="embed_tokens.weight.*vocab_size=64"):
        AutoDraft.from_pretrained(write(tmp_path, content), feature_layers=[8])


def test_a_legacy_config_must_have_its_layer_and_its_norms(tmp_path):
    with pytest.raises(DraftCheckpointError, match="transformer_layer_config"):
        config = {k: v for k, v in legacy_config().items() if k != "transformer_layer_config"}
        AutoDraft.from_pretrained(write(tmp_path, legacy(), config), feature_layers=[8])
    with pytest.raises(DraftCheckpointError, match="layernorms=True.*lacks.*transformer.input_layernorm"):
        AutoDraft.from_pretrained(write(tmp_path, legacy(), legacy_config(layernorms=True)), feature_layers=[8])
    with pytest.raises(DraftCheckpointError, match="layernorms=False.*holds"):
        AutoDraft.from_pretrained(write(tmp_path, legacy(norms=True), legacy_config()), feature_layers=[8])


def test_nothing_says_how_many_layers_the_target_has(tmp_path):
    for tensors, config, _ in SPELLINGS.values():
        with pytest.raises(DraftCheckpointError, match="last hidden state"):
            AutoDraft.from_pretrained(write(tmp_path, tensors(), config))
    draft = AutoDraft.from_pretrained(write(tmp_path, eagle()), feature_layers=[7])
    with pytest.raises(ValueError, match=r"feature_layers=\[8\]"):
        draft.attach(tiny_target())


def test_buffers_that_old_versions_saved_are_left_out_by_name(tmp_path):
    for content, layer in ((eagle(), "layers.0."), (griffin(), "layers.0."), (legacy(), "transformer.")):
        content[f"{layer}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        config = legacy_config() if layer == "transformer." else CONFIG
        draft = AutoDraft.from_pretrained(write(tmp_path, content, config), feature_layers=[8])
        assert any(f"{layer}self_attn.rotary_emb.inv_freq" in text for text in draft.config.source["decisions"])


@pytest.mark.parametrize("field, value", [
    ("rms_norm_eps", "small"), ("vocab_size", "64"), ("vocab_size", -3), ("max_position_embeddings", "2k"),
    ("rope_scaling", "yarn"), ("rope_scaling", {"type": "linear"}), ("rope_theta", "large"), ("hidden_act", "nope"),
])  # fmt: skip
def test_fields_that_make_no_sense_are_the_configs_fault(tmp_path, field, value):
    with pytest.raises(DraftCheckpointError, match="config.json"):
        AutoDraft.from_pretrained(write(tmp_path, eagle(), CONFIG | {field: value}), feature_layers=[8])


def test_old_style_rope_scaling_is_read(tmp_path):
    config = CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    rope = AutoDraft.from_pretrained(write(tmp_path, griffin(), config), feature_layers=[8]).config.rope_parameters
    assert rope["rope_type"] == "linear" and rope["factor"] == 2.0 and rope["rope_theta"] == 10000.0


def test_weights_that_are_not_finite_are_refused(tmp_path):
    content = griffin()
    content["fc.mlp.up_proj.weight"][0, 0] = torch.nan
    with pytest.raises(DraftCheckpointError, match="fc.mlp.up_proj.weight"):
        AutoDraft.from_pretrained(write(tmp_path, content), feature_layers=[8])
