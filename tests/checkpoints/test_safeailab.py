# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 checkpoints in SafeAILab's layout, written here by hand from plain tensors."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gto_hf import AutoDraft, DraftCheckpointError
from gto_hf.checkpoints import files
from gto_hf.gto import SequencePrefix
from tests.drafts.test_eagle3 import sequences
from tests.reference.naive_eagle3 import NaiveEagle3
from tests.tiny import tiny_target


H, V, VD, NH, NKV, HD, INTER = 32, 64, 24, 4, 2, 8, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INTER,
    "num_attention_heads": NH,
    "num_key_value_heads": NKV,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}


def tensors(vocab=VD):
    """Random tensors with their names and shapes."""
    torch.manual_seed(0)
    kept = torch.randperm(V)[:vocab]  # not sorted on purpose
    shapes = {
        "fc.weight": (H, 3 * H),
        "midlayer.self_attn.q_proj.weight": (NH * HD, 2 * H),
        "midlayer.self_attn.k_proj.weight": (NKV * HD, 2 * H),
        "midlayer.self_attn.v_proj.weight": (NKV * HD, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, NH * HD),
        "midlayer.mlp.gate_proj.weight": (INTER, H),
        "midlayer.mlp.up_proj.weight": (INTER, H),
        "midlayer.mlp.down_proj.weight": (H, INTER),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (vocab, H),
    }
    made = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    return made | {"d2t": kept - torch.arange(vocab), "t2d": t2d}


def write(folder, content, config=CONFIG, kind="bin"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "bin":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        save_file(content, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_logits_equal_a_plain_reading_of_the_tensors(tmp_path, kind):
    target, content = tiny_target(), tensors()
    draft = AutoDraft.from_pretrained(write(tmp_path, content, kind=kind), target=target)
    assert draft.config.feature_layers == [2, 4, 5] and draft.config.rope_parameters["rope_theta"] == 10000.0
    assert torch.equal(draft.kept_ids, content["d2t"] + torch.arange(VD))
    naive = NaiveEagle3(draft, target.get_input_embeddings().weight)
    naive.w = content  # the file's own tensors, not the draft's
    ids = torch.randint(3, V, (1, 12))
    batch = sequences(target, draft, ids)
    with torch.no_grad():
        ours = SequencePrefix(draft, batch).unrolled_logits(torch.tensor([[6]]), 3)
        row = ids[0].tolist()
        for a, b in zip(ours, naive.logits(batch.features[0, :6], row[:7], row[7:9]), strict=True):
            torch.testing.assert_close(a[0, 0], b, atol=1e-4, rtol=1e-4)


def test_a_published_draft_decodes_losslessly_and_saves_in_our_format(tmp_path):
    target = tiny_target()
    draft = AutoDraft.from_pretrained(write(tmp_path / "theirs", tensors()), target=target)
    draft.save_pretrained(tmp_path / "ours")
    again = AutoDraft.from_pretrained(tmp_path / "ours", target=target)
    assert all(
        torch.equal(a, b) for a, b in zip(draft.state_dict().values(), again.state_dict().values(), strict=True)
    )
    prompt = torch.randint(3, V, (1, 5))
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=again, **kwargs), target.generate(prompt, **kwargs))


def test_a_full_vocabulary_needs_no_map(tmp_path):
    content = {k: v for k, v in tensors(V).items() if k not in ("d2t", "t2d")}
    draft = AutoDraft.from_pretrained(
        write(tmp_path, content, CONFIG | {"draft_vocab_size": V}), feature_layers=[2, 4, 5]
    )
    assert torch.equal(draft.kept_ids, torch.arange(V))
    unset = {
        "d2t": torch.zeros(V, dtype=torch.long),
        "t2d": torch.zeros(V, dtype=torch.bool),
    }  # as some code saves them
    draft = AutoDraft.from_pretrained(
        write(tmp_path, content | unset, CONFIG | {"draft_vocab_size": V}), feature_layers=[2, 4, 5]
    )
    assert torch.equal(draft.kept_ids, torch.arange(V)) and bool(draft.t2d.all())


def test_half_precision_keeps_the_map_in_integers(tmp_path):
    content = {k: v.half() if v.is_floating_point() else v for k, v in tensors().items()}
    draft = AutoDraft.from_pretrained(write(tmp_path, content), feature_layers=[2, 4, 5])
    assert draft.dtype == torch.float16 and draft.d2t.dtype == torch.long
    draft = AutoDraft.from_pretrained(tmp_path, feature_layers=[2, 4, 5], dtype=torch.bfloat16)
    assert draft.dtype == torch.bfloat16 and draft.t2d.dtype == torch.bool


def test_scaling_is_kept_and_the_base_is_what_safeailab_trains_with(tmp_path):
    """Their training code ignores `rope_theta`; the target's rotary parameters never matter."""
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 777.0}
    old = CONFIG | {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    write(tmp_path, tensors(), old)
    with pytest.warns(UserWarning, match="rope_theta=500000"):
        config = AutoDraft.from_pretrained(tmp_path, target=target).config
    rope = config.rope_parameters
    assert rope["rope_theta"] == 10000.0 and rope["rope_type"] == "linear" and rope["factor"] == 2.0
    assert any("rope_theta" in decision for decision in config.source["decisions"])
    said = {"rope_type": "default", "rope_theta": 500000.0}
    assert AutoDraft.from_pretrained(tmp_path, target=target, rope_parameters=said).config.rope_parameters == said
    # a kind of scaling that their code does not know: trained elsewhere, so all of it is as stated
    other = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    other["original_max_position_embeddings"] = 8192
    write(tmp_path, tensors(), old | {"rope_scaling": other})
    rope = AutoDraft.from_pretrained(tmp_path, target=target).config.rope_parameters
    assert rope == other | {"rope_theta": 500000.0}


def test_a_stored_embedding_is_the_drafts_own(tmp_path):
    content = tensors() | {"embed_tokens.weight": torch.randn(V, H)}
    draft = AutoDraft.from_pretrained(write(tmp_path, content), target=tiny_target())
    assert torch.equal(draft.embed(torch.tensor([[5]]))[0, 0], content["embed_tokens.weight"][5])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("norm.weight"), "norm.weight"),
        (lambda c: c.pop("lm_head.weight"), "lm_head.weight"),
        (lambda c: c.update({"midlayer.extra.weight": torch.ones(1)}), "midlayer.extra.weight"),
        (lambda c: c.update({"norm.weight": torch.ones(H + 1)}), "norm.weight"),
        (lambda c: [c.pop("d2t"), c.pop("t2d")], "d2t"),
        (lambda c: c.update({"d2t": c["d2t"] + torch.arange(VD)}), "d2t"),  # absolute ids instead of offsets
        (lambda c: c.update({"t2d": ~c["t2d"]}), "t2d"),
    ],
)
def test_incomplete_or_broken_files_are_refused_by_name(tmp_path, change, words):
    content = tensors()
    change(content)
    with pytest.raises(DraftCheckpointError, match=words):
        AutoDraft.from_pretrained(write(tmp_path, content), target=tiny_target())


def test_without_a_target_the_feature_layers_must_be_named(tmp_path):
    write(tmp_path, tensors())
    with pytest.raises(DraftCheckpointError, match="feature_layers"):
        AutoDraft.from_pretrained(tmp_path)
    with pytest.raises(DraftCheckpointError, match="96 features"):
        AutoDraft.from_pretrained(tmp_path, feature_layers=[2, 4])


def test_an_ordinary_model_is_not_taken_for_a_draft(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(DraftCheckpointError, match="no draft"):
        AutoDraft.from_pretrained(tmp_path)


def test_unreadable_folders_say_why(tmp_path):
    with pytest.raises(DraftCheckpointError, match="neither a folder"):
        AutoDraft.from_pretrained(tmp_path / "nothing-here")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(DraftCheckpointError, match="LoRA adapter"):
        AutoDraft.from_pretrained(tmp_path / "adapter")
    folder = write(tmp_path / "cut", tensors(), kind="safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(DraftCheckpointError, match="cannot be read"):
        AutoDraft.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DraftCheckpointError, match="not JSON"):
        AutoDraft.from_pretrained(folder)


def test_a_pickle_with_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("pwned",))

    write(tmp_path, {"fc.weight": Evil()})
    with pytest.raises(Exception, match="[Ww]eights"):
        AutoDraft.from_pretrained(tmp_path)


def test_a_mistyped_folder_is_said_before_the_hub_is_asked(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    said = []
    monkeypatch.setattr(files.logger, "warning", said.append)
    monkeypatch.setattr(files, "_fetch", lambda source, name, hub: None)
    with pytest.raises(DraftCheckpointError):
        AutoDraft.from_pretrained("runs/phse2")
    assert len(said) == 1 and "no folder `runs/phse2`" in said[0]
    with pytest.raises(DraftCheckpointError):
        AutoDraft.from_pretrained("owner/name")
    assert len(said) == 1
