# SPDX-License-Identifier: Apache-2.0
"""Exports against the keys and fields that the engines' own loaders read, written here by hand."""

import copy
import json
import shlex

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gto_hf import AutoDraft, Eagle3Draft, TreeConfig
from gto_hf.drafts import DraftCheckpointError
from gto_hf.drafts.base import Borrowed
from gto_hf.export import ENGINES, check_exportable, export
from gto_hf.export.convert import convert
from gto_hf.gto import SequencePrefix
from tests.drafts.test_eagle3 import sequences
from tests.tiny import VOCAB, tiny_draft, tiny_target, tiny_tokenizer


LAYER = [
    "hidden_norm.weight",
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]
COMMON = ["d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"]
KEYS = {
    "safeailab": [*COMMON, *("midlayer." + k for k in LAYER)],
    "sglang": [*COMMON, *("midlayer." + k for k in LAYER)],
    "vllm": [*COMMON, *("layers.0." + k for k in LAYER)],
    "speculators": [*COMMON, "embed_tokens.weight", *("layers.0." + k for k in LAYER)],
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target)


def write(draft, folder, engine, target=None, **kwargs):
    made = export(draft, folder, engine, target=target, target_name="org/tiny", **kwargs)
    return made, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def first_logits(draft, target, ids):
    """Draft logits after every pair of `ids`, in the target's vocabulary."""
    batch = sequences(target, draft, ids)
    with torch.no_grad():
        rows = SequencePrefix(draft, batch).unrolled_logits(torch.tensor([[4, 6]]), 3)
    full = torch.full((3, 2, VOCAB), -torch.inf)
    full[..., draft.kept_ids] = torch.stack([row[0] for row in rows])
    return full


@pytest.mark.parametrize("engine", ENGINES)
def test_the_keys_are_those_that_the_engine_reads(tmp_path, target, draft, engine):
    _, _, tensors = write(draft, tmp_path / "out", engine, target)
    assert sorted(tensors) == sorted(KEYS[engine])
    assert tensors["d2t"].dtype == torch.long and tensors["t2d"].dtype == torch.bool
    own = {k.replace("midlayer.", "L."): v for k, v in draft.state_dict().items()}
    theirs = {k.replace("midlayer.", "L.").replace("layers.0.", "L."): v for k, v in tensors.items()}
    assert all(torch.equal(own[key], theirs[key]) for key in own)


def test_layer_ids_are_in_the_engines_own_numbering(tmp_path, target, draft):
    assert draft.config.feature_layers == [2, 4, 5]
    _, sglang, _ = write(draft, tmp_path / "a", "sglang", target)
    _, vllm, _ = write(draft, tmp_path / "b", "vllm", target)
    _, speculators, _ = write(draft, tmp_path / "c", "speculators", target)
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert vllm["eagle_aux_hidden_state_layer_ids"] == speculators["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang  # SGLang would take it for its own numbering
    assert sglang["num_aux_hidden_states"] == vllm["num_aux_hidden_states"] == 3


def test_configs_hold_what_the_loaders_ask_for(tmp_path, target, draft):
    _, vllm, _ = write(draft, tmp_path / "vllm", "vllm", target)
    _, sglang, _ = write(draft, tmp_path / "sglang", "sglang", target)
    _, speculators, _ = write(draft, tmp_path / "speculators", "speculators", target, speculative_tokens=3)
    _, safeailab, _ = write(draft, tmp_path / "safeailab", "safeailab", target)
    assert vllm["architectures"] == sglang["architectures"] == ["LlamaForCausalLMEagle3"]
    assert [vllm[k] for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [False] * 4
    assert "norm_output" not in sglang  # there a false one would mean no norm before the head to SpecForge's readers
    assert vllm["draft_vocab_size"] == sglang["draft_vocab_size"] == safeailab["draft_vocab_size"] == 48
    assert vllm["target_hidden_size"] == sglang["target_hidden_size"] == 32
    assert "target_hidden_size" not in safeailab  # it would make EAGLE look for a stored embedding
    proposal = speculators["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 3 and speculators["speculators_model_type"] == "eagle3"
    assert speculators["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert speculators["norm_before_residual"] is False  # vLLM takes a missing one for true
    for config in (vllm, sglang, safeailab, speculators["transformer_layer_config"]):
        assert config["vocab_size"] == VOCAB and config["head_dim"] == 8 and config["tie_word_embeddings"] is False


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_transformers_reads_the_rotary_parameters_back(tmp_path, target, engine):
    draft = tiny_draft(target)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    draft.config.rope_parameters = rope
    write(draft, tmp_path / "out", engine, target)
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert {k: read.rope_parameters[k] for k in rope} == rope
    plain = json.loads((tmp_path / "out" / "config.json").read_text())
    assert plain["rope_theta"] == 500000.0 and plain["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.parametrize("engine", ENGINES)
def test_read_write_read_gives_equal_logits(tmp_path, target, draft, engine):
    write(draft, tmp_path / "out", engine, target)
    again = AutoDraft.from_pretrained(tmp_path / "out", target=target)
    again.save_pretrained(tmp_path / "ours")
    third = AutoDraft.from_pretrained(tmp_path / "ours", target=target)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = first_logits(draft, target, ids)
    assert again.config.feature_layers == [2, 4, 5]
    assert torch.equal(first_logits(again, target, ids), expected)
    assert torch.equal(first_logits(third, target, ids), expected)


def test_a_full_vocabulary_is_written_in_the_targets_order_without_a_map(tmp_path, target):
    draft = Eagle3Draft.from_target(target).eval()
    draft.set_vocab(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)))
    _, config, tensors = write(draft, tmp_path / "vllm", "vllm", target)
    assert config["draft_vocab_size"] == VOCAB and "d2t" not in tensors and "t2d" not in tensors
    assert torch.equal(tensors["lm_head.weight"][draft.kept_ids], draft.lm_head.weight)
    write(draft, tmp_path / "theirs", "safeailab", target)
    again = AutoDraft.from_pretrained(tmp_path / "theirs", target=target)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(first_logits(again, target, ids), first_logits(draft, target, ids))


def test_positions_are_the_targets_and_the_trained_length_stands_apart(tmp_path, target):
    draft = tiny_draft(target)
    draft.config.max_position_embeddings, draft.config.trained_length = 128, 128
    made, config, _ = write(draft, tmp_path / "with", "sglang", target)
    assert config["max_position_embeddings"] == 512 and config["trained_length"] == 128
    made, config, _ = write(draft, tmp_path / "without", "sglang")
    assert config["max_position_embeddings"] == 128 and "--target" in "".join(made.notes)


def test_embeddings_own_shared_and_copied(tmp_path, target, draft):
    table = target.get_input_embeddings().weight
    _, _, tensors = write(draft, tmp_path / "a", "vllm", target, with_embeddings=True)
    assert torch.equal(tensors["embed_tokens.weight"], table)
    with pytest.raises(ValueError, match="always takes the target's"):
        write(draft, tmp_path / "b", "sglang", target, with_embeddings=True)
    alone = copy.deepcopy(draft)
    alone._borrowed = Borrowed()
    with pytest.raises(ValueError, match="--target"):
        write(alone, tmp_path / "b", "speculators")
    target.save_pretrained(tmp_path / "target")
    _, _, tensors = write(alone, tmp_path / "b", "speculators", str(tmp_path / "target"))
    assert torch.equal(tensors["embed_tokens.weight"], table)

    own = Eagle3Draft.from_target(target, own_embeddings=True)
    torch.nn.init.normal_(own.embed_tokens.weight)
    with pytest.raises(ValueError, match="token embedding of its own"):
        write(own, tmp_path / "c", "sglang", target)
    _, config, tensors = write(own, tmp_path / "c", "safeailab", target)
    assert config["target_hidden_size"] == 32 and torch.equal(tensors["embed_tokens.weight"], own.embed_tokens.weight)


def test_a_narrow_draft_keeps_its_own_embedding_everywhere(tmp_path, target):
    draft = Eagle3Draft.from_target(target, hidden_size=16, head_dim=4, own_embeddings=True)
    for engine in ("vllm", "sglang", "speculators"):
        _, config, tensors = write(draft, tmp_path / engine, engine, target)
        assert config["target_hidden_size"] == 32 and tensors["embed_tokens.weight"].shape == (VOCAB, 16)
        assert tensors["fc.weight"].shape == (16, 96)


@pytest.mark.parametrize(
    "engine, change, words",
    [
        ("safeailab", {"norm_before_fc": True}, "norm_before_fc"),
        ("safeailab", {"fc_norm": True}, "fc_norm"),
        ("safeailab", {"norm_output": True}, "norm_output"),
        ("safeailab", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"qk_norm": True}, "qk_norm"),
        ("sglang", {"sliding_window": 64}, "sliding_window=64"),
        ("sglang", {"fc_bias": True}, "fc_bias"),
        ("vllm", {"fc_bias": True}, "fc_bias"),
        ("vllm", {"attention_bias": True}, "attention_bias"),
        ("vllm", {"mlp_bias": True}, "mlp_bias"),
        ("speculators", {"attention_bias": True}, "attention_bias"),
        ("safeailab", {"head_dim": 16}, "head_dim=16"),
        ("safeailab", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("safeailab", {"feature_layers": [1, 4, 5]}, r"\[2, 4, 5\]"),
        ("safeailab", {"feature_layers": [2, 5]}, r"\[2, 5\]"),
        ("vllm", {"feature_layers": [2, 4, 8]}, "final norm"),
        ("sglang", {"feature_layers": [0, 4, 5]}, "embeddings"),
        ("vllm", {"hidden_act": "gelu"}, "gelu"),
        ("vllm", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
        ("safeailab", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "llama3"),
        (
            "vllm",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
        ("vllm", {"draft_type": "griffin"}, "only safeailab can"),
        ("speculators", {"draft_type": "eagle"}, "safeailab, sglang, vllm can"),
        ("vllm", {"draft_type": "causal_lm"}, "draft.model.save_pretrained"),
        ("tensorrt", {}, "safeailab, sglang, vllm, speculators"),
    ],
)
def test_what_a_dialect_cannot_say_is_refused_by_name(draft, engine, change, words):
    config = copy.deepcopy(draft.config)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        check_exportable(config, engine)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_flags_that_a_dialect_has_are_accepted(draft, engine):
    config = copy.deepcopy(draft.config)
    for name in ("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm"):
        setattr(config, name, True)
    config.num_hidden_layers = 2
    assert check_exportable(config, engine).engine == engine


def test_a_tensor_without_a_place_is_refused(tmp_path, target):
    draft = tiny_draft(target)
    draft.midlayer.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers\.0\.extra\.bias"):
        write(draft, tmp_path / "out", "vllm", target)
    assert not list(tmp_path.iterdir())


def test_another_target_is_refused_with_both_numbers(tmp_path, draft):
    with pytest.raises(ValueError, match="`vocab_size=64`.* 72"):
        write(draft, tmp_path / "out", "vllm", tiny_target(vocab=72))


def test_a_folder_appears_whole_or_not_at_all(tmp_path, target, draft, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    write(draft, folder, "vllm", target)  # an empty one is taken
    with pytest.raises(ValueError, match="not empty.*--overwrite"):
        write(draft, folder, "sglang", target)
    before = (folder / "config.json").read_text()

    def broken(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("gto_hf.export.write.save_file", broken)
        with pytest.raises(OSError, match="disk full"):
            write(draft, folder, "sglang", target, overwrite=True)
    assert (folder / "config.json").read_text() == before and len(list(tmp_path.iterdir())) == 1
    write(draft, folder, "sglang", target, overwrite=True)
    assert (folder / "config.json").read_text() != before and len(list(tmp_path.iterdir())) == 1


def test_the_draft_itself_is_never_overwritten(tmp_path, target, draft):
    draft.save_pretrained(tmp_path / "ours")
    again = AutoDraft.from_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="which is read from"):
        export(again, tmp_path / "ours", "vllm", target=target, overwrite=True)


def test_no_folder_that_holds_what_is_read_is_replaced(tmp_path, target, draft):
    for name in ("runs/draft", "runs/target"):
        (draft if name == "runs/draft" else target).save_pretrained(tmp_path / name)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "target")
    other = Eagle3Draft.from_pretrained(tmp_path / "runs" / "draft")
    other.config.name_or_path = ""
    for out, source, of in (
        ("runs", tmp_path / "runs" / "draft", None),
        ("runs/target", other, str(tmp_path / "runs" / "target")),
        ("runs/target", other, loaded),
    ):
        with pytest.raises(ValueError, match="which is read from"):
            export(source, tmp_path / out, "vllm", target=of, target_name="org/tiny", overwrite=True)
    with pytest.raises(ValueError, match="which is read from"):
        convert(tmp_path / "runs" / "draft", tmp_path / "runs", overwrite=True)
    assert (tmp_path / "runs" / "draft" / "config.json").exists()
    assert (tmp_path / "runs" / "target" / "config.json").exists()


def test_a_link_is_followed_and_a_folder_that_cannot_be_moved_leaves_nothing_behind(
    tmp_path, target, draft, monkeypatch
):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(draft, tmp_path / "link", "vllm", target)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()

    def busy(*args):
        raise OSError("Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr("gto_hf.export.folder.os.replace", busy)
        with pytest.raises(OSError, match="busy"):
            write(draft, tmp_path / "real", "sglang", target, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_folder_near_at_hand_is_no_hub_id(tmp_path, target, draft, monkeypatch):
    target.save_pretrained(tmp_path / "runs" / "llm")
    monkeypatch.chdir(tmp_path)
    for of in ("runs/llm", AutoModelForCausalLM.from_pretrained("runs/llm")):
        with pytest.raises(ValueError, match="--target-name"):
            export(draft, "named", "speculators", target=of)
        export(draft, "out", "vllm", target=of, overwrite=True)
        assert json.loads((tmp_path / "out" / "gto_hf_export.json").read_text())["target"] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_the_trained_length_comes_back(tmp_path, target, engine):
    draft = tiny_draft(target)
    for length in (100, None):
        draft.config.trained_length = length
        write(draft, tmp_path / "out", engine, target, overwrite=True)
        assert AutoDraft.from_pretrained(tmp_path / "out", target=target).config.trained_length == length


def test_a_draft_without_a_map_or_with_nan_is_not_written(tmp_path, target, draft):
    with pytest.raises(DraftCheckpointError, match="vocabulary map"):
        write(Eagle3Draft(copy.deepcopy(draft.config)), tmp_path / "out", "vllm", target)
    broken = copy.deepcopy(draft)
    broken.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(DraftCheckpointError, match="fc.weight"):
        write(broken, tmp_path / "out", "vllm", target)
    assert not (tmp_path / "out").exists()


def test_nothing_written_names_this_machine(tmp_path, target, draft):
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="--target-name"):
        export(draft, tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    for engine in ENGINES:
        folder = tmp_path / engine
        write(draft, folder, engine, str(tmp_path / "target"), tokenizer=tiny_tokenizer())
        assert (folder / "tokenizer.json").exists()
        for file in folder.iterdir():
            assert str(tmp_path).encode() not in file.read_bytes(), file
    with pytest.raises(ValueError, match="Hub id"):
        export(draft, tmp_path / "x", "vllm", target=target, target_name=str(tmp_path))


def test_dtype(tmp_path, target, draft):
    _, config, tensors = write(draft, tmp_path / "out", "vllm", target, dtype=torch.bfloat16)
    assert config["torch_dtype"] == "bfloat16" and tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.long


def test_commands_say_chain_and_tree_in_the_engines_own_counts(tmp_path, target):
    draft = tiny_draft(target, tree=TreeConfig(depth=4, top_k=5, total_tokens=20))
    made, _, _ = write(draft, tmp_path / "with space", "vllm", target)
    words = shlex.split(made.commands["TRL (chain)"])
    spec = json.loads(words[words.index("--speculative-config") + 1])
    assert spec == {"method": "eagle3", "model": str(tmp_path / "with space"), "num_speculative_tokens": 4}
    assert words[words.index("--model") + 1] == "org/tiny"
    made, _, _ = write(draft, tmp_path / "sglang", "sglang", target)
    chain, tree = (shlex.split(made.commands[f"SGLang, {k}"]) for k in ("chain", "tree"))
    numbers = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    assert [chain[chain.index(n) + 1] for n in numbers] == ["4", "1", "5"]
    assert [tree[tree.index(n) + 1] for n in numbers] == ["4", "5", "21"]
    made, _, _ = write(draft, tmp_path / "safeailab", "safeailab", target)
    assert "total_token=21, depth=3, top_k=5" in made.commands["EAGLE's own code (tree)"]


def test_an_adapter_must_be_merged_first(tmp_path, target):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_draft(target), LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(TypeError, match="merge_and_unload"):
        export(model, tmp_path / "out", "vllm", target=target)
