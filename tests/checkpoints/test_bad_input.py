# SPDX-License-Identifier: Apache-2.0
"""Broken, foreign and malicious folders: each is refused with an error that names the file or the key, and nothing runs."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gto_hf import AutoDraft, DraftCheckpointError, Eagle3Draft
from tests.checkpoints.dialect_files import HD, SPELLINGS, VD, VOCAB, WIDTH, weights
from tests.tiny import TREE, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def ours(target, tmp_path_factory):
    """A folder in our format that uses every kind of tensor."""
    folder = tmp_path_factory.mktemp("ours")
    options = {"norm_before_fc": True, "fc_bias": True, "qk_norm": True, "num_hidden_layers": 2, "norm_output": True}
    counts = torch.arange(VOCAB)
    Eagle3Draft.from_target(target, draft_vocab_size=VD, token_counts=counts, tree=TREE, **options).save_pretrained(
        folder
    )
    return folder


def refused(folder, *words, error=DraftCheckpointError, **kwargs):
    """The folder is refused, by an error that has all these words."""
    with warnings.catch_warnings(), pytest.raises(error) as caught:
        warnings.simplefilter("ignore")
        AutoDraft.from_pretrained(folder, **kwargs)
    message = str(caught.value)
    assert str(folder) in message or error is not DraftCheckpointError, message
    for word in words:
        assert word in message, (word, message)


def rewritten(folder, to, tensors=None, config=None):
    """A copy of a folder in our format with changed tensors or config."""
    to.mkdir(exist_ok=True)
    content, fields = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if tensors is not None:
        content = tensors(content) or content
    (to / "config.json").write_text(json.dumps(fields | (config or {})))
    save_file(content, to / "model.safetensors", metadata={"format": "pt"})
    return to


# ---------------------------------------------------------------- tensors, in every spelling
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_missing_tensor_is_named(target, tmp_path, name):
    spelling = SPELLINGS[name]
    made = weights(spelling.facts)
    # These may be left out by design: the map's other half tells them, or the target's embedding stands in.
    optional = {"t2d", "embed_tokens.weight"} | ({"midlayer.self_attn.q_norm.weight"} & set(made))
    for key in sorted(set(made) - optional - set(spelling.drop)):
        folder = spelling.write(tmp_path / key, {k: v for k, v in made.items() if k != key})
        # A missing norm or bias shows as a contradiction with the config, or by the names of its neighbours.
        if key in ("fc.bias", "midlayer.self_attn.o_proj.bias"):
            continue  # optional by itself; the others come in threes
        words = {"d2t": "d2t", "input_norm.weight": "norm_before_fc"}.get(key) or spelling.name(key).split(".")[-2]
        if key in ("midlayer.self_attn.q_proj.bias", "midlayer.mlp.gate_proj.bias"):
            words = "bias"  # its neighbours are left over
        elif key.startswith("fc_norm."):
            words = "fc_norm"  # named as ours, whatever it is called there
        refused(folder, words, target=target, **spelling.said)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_wrong_shape_and_kind_is_named(target, tmp_path, name):
    spelling = SPELLINGS[name]
    made = weights(spelling.facts)
    for key in sorted(set(made) - set(spelling.drop)):
        value = made[key]
        for what, wrong in (
            ("rows", torch.cat([value, value[:1]])),
            ("flat", value.flatten()[None, None]),
            ("kind", value.float() if key in ("d2t", "t2d") else value.to(torch.int8)),
            ("nan", value if key in ("d2t", "t2d") else torch.full_like(value, torch.nan)),
        ):
            if what == "nan" and key in ("d2t", "t2d"):
                continue
            folder = spelling.write(tmp_path / f"{key}-{what}", made | {key: wrong})
            with warnings.catch_warnings(), pytest.raises(DraftCheckpointError) as caught:
                warnings.simplefilter("ignore")
                AutoDraft.from_pretrained(folder, target=target, **spelling.said)
            assert str(folder) in str(caught.value) and "`" in str(caught.value), (key, what, str(caught.value))


@pytest.mark.parametrize("name", SPELLINGS)
def test_left_over_tensors_are_named(target, tmp_path, name):
    spelling = SPELLINGS[name]
    made = weights(spelling.facts)
    for key in ("midlayer.self_attn.extra.weight", "second.weight", "midlayer.mlp.down_proj.bias_2"):
        folder = spelling.write(tmp_path / key, made | {key: torch.ones(2)})
        refused(folder, key.split(".")[-2], target=target, **spelling.said)


def test_a_tensor_under_two_names_is_refused(target, tmp_path):
    spelling = SPELLINGS["safeailab"]
    made = weights(spelling.facts)
    twice = {"layers.0.hidden_norm.weight": made["midlayer.hidden_norm.weight"]}
    refused(spelling.write(tmp_path, made | twice), "twice", "hidden_norm", target=target)


# ---------------------------------------------------------------- the map, in both formats
MAPS = {
    "out of range": (lambda t: t | {"d2t": t["d2t"] + VOCAB}, "outside"),
    "negative": (lambda t: t | {"d2t": t["d2t"] - VOCAB}, "outside"),
    "duplicates": (lambda t: t | {"d2t": t["d2t"][0] - torch.arange(VD)}, "d2t"),
    "inconsistent": (lambda t: t | {"t2d": ~t["t2d"]}, "t2d"),
    "too many kept": (lambda t: t | {"t2d": torch.ones_like(t["t2d"])}, "t2d"),
    "short": (lambda t: t | {"d2t": t["d2t"][:-1]}, "d2t"),
    "of another vocabulary": (lambda t: t | {"t2d": t["t2d"][:-1]}, "t2d"),
}


@pytest.mark.parametrize("change, word", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_broken_maps_are_refused(target, ours, tmp_path, kind, change, word):
    if kind == "ours":
        refused(rewritten(ours, tmp_path, change), word, target=target)
    else:
        spelling = SPELLINGS["safeailab"]
        refused(spelling.write(tmp_path, change(weights(spelling.facts))), word, target=target)


def test_absolute_ids_in_d2t_are_told_from_offsets(target, tmp_path):
    spelling = SPELLINGS["safeailab"]
    made = weights(spelling.facts)
    folder = spelling.write(tmp_path, made | {"d2t": made["d2t"] + torch.arange(VD)})
    refused(folder, "holds target ids themselves", "offsets", target=target)


# ---------------------------------------------------------------- configs that lie
LIES = {
    "hidden_size": WIDTH + 8,
    "intermediate_size": 99,
    "num_key_value_heads": 4,
    "head_dim": HD // 2,
    "vocab_size": VOCAB + 1,
    "draft_vocab_size": VD + 1,
    "num_hidden_layers": 3,
    "num_aux_hidden_states": 5,
    "fc_norm": True,
    "norm_before_fc": True,
}


@pytest.mark.parametrize("field, value", LIES.items(), ids=LIES)
def test_a_config_that_lies_about_sizes_is_refused_by_field(target, tmp_path, field, value):
    spelling = SPELLINGS["specforge_sglang"]
    refused(
        spelling.write(tmp_path, config=spelling.config | {field: value}),
        f"`{field}={value}`",
        "config.json",
        target=target,
    )


@pytest.mark.parametrize("value", [0, -4, "4", None, True, 3, 2.0])
def test_a_number_of_heads_that_cannot_be_is_refused(target, tmp_path, value):
    spelling = SPELLINGS["safeailab"]
    folder = spelling.write(tmp_path, config=spelling.config | {"num_attention_heads": value})
    refused(folder, "num_attention_heads", target=target)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per kind of layer"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 3, 1, 6]}}, "ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, "feature_layers="),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1", 3, 4, 6]}}, "a list of numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "a list of numbers"),
        ({"eagle_config": "yes"}, "wrong kind"),
        ({"target_hidden_size": "wide"}, "target_hidden_size='wide'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"hidden_act": "nope"}, "nope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "config.json"),
        ({"rope_scaling": "yarn"}, "yarn"),
        ({"rope_theta": "large"}, "large"),
        ({"architectures": 5}, "config.json"),
    ],
)
def test_fields_that_make_no_sense_are_refused(target, tmp_path, change, words):
    spelling = SPELLINGS["specforge_sglang"]
    refused(spelling.write(tmp_path, config=spelling.config | change), words, target=target)


def test_layers_that_the_target_does_not_have_are_refused(target, tmp_path):
    spelling = SPELLINGS["specforge_sglang"]
    config = spelling.config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 60]}}
    refused(spelling.write(tmp_path, config=config), "8 layers", "61", target=target, error=ValueError)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format_version": 99}, "format_version=99"),
        ({"draft_type": "telepathy"}, "telepathy"),
        ({"draft_type": None}, "draft"),
        ({"hidden_size": 64, "target_hidden_size": 64, "head_dim": 16}, "wrong shape"),
        ({"intermediate_size": 50}, "mlp"),
        ({"draft_vocab_size": VD + 1}, "d2t"),
        ({"vocab_size": VOCAB + 1}, "t2d"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"num_hidden_layers": 1}, "layers.1"),
        ({"feature_layers": [1, 2]}, "fc.weight"),
        ({"norm_before_fc": False}, "input_norm"),
        ({"fc_bias": False}, "fc.bias"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"tree": {"levels": 3}}, "levels"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"hidden_act": "nope"}, "nope"),
    ],
)
def test_our_own_folders_with_a_wrong_config_are_refused(target, ours, tmp_path, change, words):
    refused(rewritten(ours, tmp_path, config=change), words)


OURS = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "norm.weight"),
    "left over": (lambda t: t | {"extra.weight": torch.ones(2)}, "extra.weight"),
    "shape": (lambda t: t | {"norm.weight": torch.ones(WIDTH + 1)}, "norm.weight"),
    "whole numbers": (lambda t: t | {"norm.weight": torch.ones(WIDTH, dtype=torch.int32)}, "norm.weight"),
    "nan": (lambda t: t | {"norm.weight": torch.full((WIDTH,), torch.nan)}, "norm.weight"),
    "infinite": (lambda t: t | {"fc.bias": torch.full((WIDTH,), torch.inf)}, "fc.bias"),
    "map of fractions": (lambda t: t | {"d2t": t["d2t"] + 0.4}, "d2t"),
    "mask of fractions": (lambda t: t | {"t2d": t["t2d"] * 0.5}, "t2d"),
}


def stored_as(folder, kind):
    """The same tensors in other files: a pickle, or shards of one file."""
    content = load_file(folder / "model.safetensors")
    if kind == "model.safetensors":
        return folder
    (folder / "model.safetensors").unlink()
    if kind == "pytorch_model.bin":
        torch.save(content, folder / kind)
        return folder
    save_file(content, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(content, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


FILES = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("change, word", OURS.values(), ids=OURS)
def test_our_own_folders_with_wrong_tensors_are_refused(ours, tmp_path, change, word, kind):
    refused(stored_as(rewritten(ours, tmp_path, change), kind), word)


@pytest.mark.parametrize("kind", FILES)
def test_our_own_folders_load_from_any_files(ours, tmp_path, kind):
    loaded = AutoDraft.from_pretrained(stored_as(rewritten(ours, tmp_path), kind)).state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in load_file(ours / "model.safetensors").items())


def test_an_older_pickle_beside_shards_is_not_read(target, tmp_path):
    spelling = SPELLINGS["safeailab"]
    newer, older = weights(spelling.facts), weights(spelling.facts, seed=1)
    spelling.write(tmp_path, older)
    save_file(newer, tmp_path / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(newer, "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(AutoDraft.from_pretrained(tmp_path, target=target).fc.weight, newer["fc.weight"])


def test_a_damaged_pickle_is_refused_wherever_it_is_damaged(tmp_path):
    spelling = SPELLINGS["safeailab"]
    path = spelling.write(tmp_path) / "pytorch_model.bin"
    for content in (
        b"q",
        b".",
        b"(.",
        b"\x80\x02K\x00s.",
        b"\x80\x02}h\x05.",
        b"G\x00",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
    ):
        path.write_bytes(content)
        refused(tmp_path, "pytorch_model.bin", feature_layers=[2, 4, 5])


def test_a_dtype_that_is_none_is_refused(target, tmp_path):
    folder = SPELLINGS["safeailab"].write(tmp_path)
    for dtype in ("float99", "nn", torch.int8):
        refused(folder, "dtype", error=ValueError, target=target, dtype=dtype)


# ---------------------------------------------------------------- files
def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def header_lies(path):
    data = bytearray(path.read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)


DAMAGE = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "header": header_lies,
    "text": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("kind", ["ours", "safetensors", "bin"])
def test_damaged_files_are_named(ours, tmp_path, kind, damage):
    if kind == "ours":
        rewritten(ours, tmp_path)
    else:
        SPELLINGS["safeailab" if kind == "bin" else "truncated"].write(tmp_path)
    file = "pytorch_model.bin" if kind == "bin" else "model.safetensors"
    damage(tmp_path / file)
    refused(tmp_path, f"`{file}`", "cannot be read")


class Evil:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("place", ["the file", "a value", "a key's value in a list", "our folder"])
def test_a_pickle_with_code_does_not_run(ours, tmp_path, place):
    trap, folder = tmp_path / "trap", tmp_path / "folder"
    spelling = SPELLINGS["safeailab"]
    made = weights(spelling.facts)
    spelling.write(folder)
    if place == "our folder":
        (folder / "config.json").write_text((ours / "config.json").read_text())
        made = load_file(ours / "model.safetensors")
    evil = Evil(trap)
    content = {"the file": evil, "a key's value in a list": {**made, "x": [evil]}}.get(
        place, {**made, "norm.weight": evil}
    )
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, "cannot be read as plain tensors")
    assert not trap.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # the trap is real
    assert trap.exists()


@pytest.mark.parametrize("content", [[1, 2], {"fc.weight": [1.0]}, {1: torch.ones(2)}, torch.ones(2), {}])
def test_pickles_that_hold_something_else_are_refused(tmp_path, content):
    SPELLINGS["safeailab"].write(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path)


def test_folders_without_weights_or_config_say_what_is_missing(ours, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SPELLINGS["safeailab"].config))
    refused(tmp_path, "model.safetensors", "pytorch_model.bin")
    (tmp_path / "config.json").write_text((ours / "config.json").read_text())
    refused(tmp_path, "model.safetensors")
    for text, words in (("[1]", "list"), ("{", "not JSON"), ("", "not JSON")):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, "config.json", words)


# ---------------------------------------------------------------- folders that are something else
def _layer(prefix, attention="self_attn"):
    return {f"{prefix}.{attention}.{n}_proj.weight": torch.ones(8, 8) for n in "qkvo"}


EAGLE3 = {"fc.weight": torch.ones(8, 24), "layers.0.hidden_norm.weight": torch.ones(8)}
STRANGERS = {
    "LoRA": (
        {"model_type": "llama"},
        {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)},
        "LoRA adapter",
    ),
    "LoRA on many layers": (
        {},
        {f"model.layers.{i}.self_attn.q_proj.lora_A.weight": torch.ones(2, 8) for i in range(3)},
        "LoRA adapter",
    ),
    "P-EAGLE": ({}, EAGLE3 | {"mask_hidden": torch.ones(1, 1, 24)}, "P-EAGLE"),
    "P-EAGLE of speculators": ({"speculators_model_type": "peagle"}, EAGLE3, "peagle"),
    "DFlash": ({"dflash_config": {"mask_token_id": 1}}, EAGLE3 | _layer("layers.1"), "DFlash"),
    "DFlash of speculators": ({"speculators_model_type": "dflash", "block_size": 8}, EAGLE3, "dflash"),
    "DSpark": ({"speculators_model_type": "dspark"}, EAGLE3, "dspark"),
    "Medusa": (
        {"medusa_num_heads": 4},
        {"0.0.linear.weight": torch.ones(8, 8), "0.1.weight": torch.ones(9, 8)},
        "Medusa",
    ),
    "Medusa of ModelOpt": (
        {},
        EAGLE3 | {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(1)},
        "Medusa",
    ),
    "MTP": ({"num_nextn_predict_layers": 1}, {"model.layers.61.eh_proj.weight": torch.ones(8, 16)}, "MTP"),
    "latent attention": ({}, EAGLE3 | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(8, 8)}, "MLA"),
    "experts": ({}, EAGLE3 | {"layers.0.mlp.experts.0.up_proj.weight": torch.ones(8, 8)}, "experts"),
    "quantized": ({}, EAGLE3 | {"layers.0.mlp.up_proj.weight_scale": torch.ones(8)}, "quantized"),
    "anything": ({}, {"a": torch.ones(1), "b": torch.ones(1)}, "`a`, `b`"),
}


@pytest.mark.parametrize("config, tensors, words", STRANGERS.values(), ids=STRANGERS)
def test_a_folder_that_is_something_else_is_named(tmp_path, config, tensors, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "no draft that gto-hf can read", words)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_target_is_named_as_a_language_model(tmp_path, arch):
    model = tiny_target(arch)
    model.save_pretrained(tmp_path)
    refused(tmp_path, "a language model of 8 layers", type(model).__name__, "CausalLMDraft")


def test_an_adapter_of_something_else_says_so(target, tmp_path):
    from peft import LoraConfig, get_peft_model

    target.save_pretrained(tmp_path / "target")
    again = type(target).from_pretrained(tmp_path / "target")
    get_peft_model(again, LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    refused(tmp_path / "adapter", "base", "a language model of 8 layers")
