# SPDX-License-Identifier: Apache-2.0
"""The commands `convert` and `export`, and the `custom_generate` repository."""

import copy
import json
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gto_hf import AutoDraft, TreeDecodeOutput
from gto_hf.cli import main
from gto_hf.drafts import EagleDraft, GriffinDraft
from gto_hf.export import export
from gto_hf.export.convert import convert
from gto_hf.export.custom_generate import export_custom_generate
from tests.checkpoints.test_safeailab import CONFIG, tensors, write
from tests.tiny import VOCAB, tiny_draft, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_draft(target).save_pretrained(folder / "draft")
    return folder


def test_export_command_writes_and_says_how_to_serve(folders, tmp_path, capsys):
    common = [
        "export",
        f"{folders}/draft",
        "--to",
        "vllm",
        "--output",
        f"{tmp_path}/out",
        "--target",
        f"{folders}/target",
    ]
    assert main([*common, "--target-name", "org/tiny", "--dtype", "float16", "--speculative-tokens", "3"]) == 0
    out = capsys.readouterr().out
    commands = [shlex.split(line) for line in out.splitlines() if "--speculative-config" in line]
    assert [words[:2] for words in commands] == [["vllm", "serve"], ["trl", "vllm-serve"]]
    for words in commands:
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert config == {"method": "eagle3", "model": f"{tmp_path}/out", "num_speculative_tokens": 3}
        assert "org/tiny" in words
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == torch.float16
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert main(common) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main([*common, "--overwrite"]) == 0


def test_export_command_takes_the_targets_layers_where_the_draft_names_none(folders, tmp_path):
    common = ["--target", f"{folders}/target", "--target-name", "org/tiny", "--output"]
    draft = tiny_draft(tiny_target())  # it follows EAGLE-3's rule, which is all that this layout can say
    export(draft, tmp_path / "theirs", "safeailab", target=f"{folders}/target")
    assert main(["export", f"{tmp_path}/theirs", "--to", "vllm", *common, f"{tmp_path}/out"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    export(str(tmp_path / "theirs"), tmp_path / "again", "vllm", target=f"{folders}/target")


@pytest.mark.parametrize("cls", [EagleDraft, GriffinDraft])
def test_a_draft_of_the_last_hidden_state_needs_only_its_targets_name(folders, tmp_path, cls):
    target = tiny_target()
    export(cls.from_target(target), tmp_path / "theirs", "safeailab", target=target)
    named = ["--target", f"{folders}/target"]
    assert main(["convert", f"{tmp_path}/theirs", f"{tmp_path}/ours", *named]) == 0
    ours = AutoDraft.from_pretrained(tmp_path / "ours", target=target)
    assert type(ours) is cls and ours.config.feature_layers == [8] and ours.config.target["num_hidden_layers"] == 8
    again = ["export", f"{tmp_path}/theirs", "--to", "safeailab", "--output", f"{tmp_path}/again", *named]
    assert main(again) == 0


def test_convert_refuses_a_target_of_another_depth(folders, tmp_path):
    for layers, stored in ((4, None), (12, 8)):
        config = copy.deepcopy(tiny_target().config)
        config.num_hidden_layers = layers
        config.save_pretrained(tmp_path / "other")
        draft = tiny_draft(tiny_target())
        source = folders / "draft" if stored else tmp_path / "theirs"
        if not stored:
            export(draft, source, "vllm", target=tiny_target())
        with pytest.raises(ValueError, match=f"{layers}"):
            convert(source, tmp_path / "out", target=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_a_folder_is_no_target_of_a_custom_generate_repository(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(folders.parent)
    name = f"{folders.name}/target"
    options = ["--to", "custom-generate", "--repo", "me/draft", "--target", name, "--output", f"{tmp_path}/out"]
    assert main(["export", f"{folders}/draft", *options]) == 0
    assert name not in (tmp_path / "out" / "README.md").read_text()


def test_export_command_refuses_before_it_reads(folders, tmp_path, capsys):
    assert main(["export", f"{folders}/draft", "--to", "sglang", "--output", f"{folders}/draft", "--overwrite"]) == 1
    assert "which is read from" in capsys.readouterr().err
    assert main(["export", f"{folders}/draft", "--to", "custom-generate", "--output", f"{tmp_path}/x"]) == 1
    assert "--repo" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["export", f"{folders}/draft", "--to", "tensorrt", "--output", f"{tmp_path}/x"])
    assert stop.value.code == 2 and not list(tmp_path.iterdir())


def test_convert_command_reads_a_foreign_draft_and_says_what_was_decided(folders, tmp_path, capsys):
    write(tmp_path / "theirs", tensors(), CONFIG | {"rope_theta": 500000.0})
    assert main(["convert", f"{tmp_path}/theirs", f"{tmp_path}/a", "--target", f"{folders}/target"]) == 0
    out = capsys.readouterr().out
    assert "[2, 4, 5]" in out and "24 of 64" in out and "the target's" in out and "SafeAILab" in out
    assert "base 10000.0" in out and "decided: `rope_theta=500000` is ignored" in out
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["target"]["num_hidden_layers"] == 8 and config["target"]["name_or_path"] is None
    again = AutoDraft.from_pretrained(tmp_path / "a", target=tiny_target())
    assert all(torch.equal(again.state_dict()[key], value) for key, value in tensors().items())
    command = ["convert", f"{tmp_path}/theirs", f"{tmp_path}/b", "--feature-layers", "1,3,6", "--dtype", "bfloat16"]
    assert main(command) == 0
    again = AutoDraft.from_pretrained(tmp_path / "b")
    assert again.config.feature_layers == [1, 3, 6] and again.dtype == torch.bfloat16


def test_convert_command_refuses_what_it_cannot_know(folders, tmp_path, capsys):
    write(tmp_path / "theirs", tensors())
    assert main(["convert", f"{tmp_path}/theirs", f"{tmp_path}/out"]) == 1
    assert "feature_layers" in capsys.readouterr().err
    assert main(["convert", f"{tmp_path}/theirs", f"{tmp_path}/out", "--feature-layers", "two"]) == 1
    assert "2,16,29" in capsys.readouterr().err
    tiny_target(vocab=72).save_pretrained(tmp_path / "wide")
    assert main(["convert", f"{tmp_path}/theirs", f"{tmp_path}/out", "--target", f"{tmp_path}/wide"]) == 1
    assert "`vocab_size=64`" in capsys.readouterr().err and "72" not in str(list(tmp_path.glob("out*")))
    assert not (tmp_path / "out").exists()


PROMPT = torch.tensor([[5, 9, 30, 7]])
KWARGS = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": False}


def test_custom_generate_works_from_a_folder(folders, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    draft = AutoDraft.from_pretrained(folders / "draft")
    made = export_custom_generate(draft, tmp_path / "repo", "org/tiny-draft", target_name="org/tiny")
    assert 'custom_generate="org/tiny-draft"' in str(made)
    card = (tmp_path / "repo" / "README.md").read_text()
    assert "- custom_generate" in card and "base_model: org/tiny" in card and "@" not in card
    plain = target.generate(PROMPT, **KWARGS)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(PROMPT, custom_generate=str(tmp_path / "repo"), trust_remote_code=False, **KWARGS)
    output = target.generate(
        PROMPT,
        custom_generate=str(tmp_path / "repo"),
        trust_remote_code=True,
        draft=str(tmp_path / "repo"),
        return_dict_in_generate=True,
        **KWARGS,
    )
    assert isinstance(output, TreeDecodeOutput) and torch.equal(output.sequences, plain)
    assert output.statistics.drafted_tokens > output.statistics.rounds  # trees, not plain decoding


def test_custom_generate_works_from_a_repository_in_the_cache(folders, tmp_path, monkeypatch):
    draft = AutoDraft.from_pretrained(folders / "draft")
    cache, commit = tmp_path / "cache" / "models--org--tiny-draft", "0" * 39 + "1"
    export_custom_generate(draft, cache / "snapshots" / commit, "org/tiny-draft")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    code = (
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folders / 'target')!r})\n"
        f"prompt = torch.tensor({PROMPT.tolist()})\n"
        "kwargs = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)\n"
        "output = model.generate(prompt, custom_generate='org/tiny-draft', trust_remote_code=True, "
        "return_dict_in_generate=True, **kwargs)\n"
        "print(output.statistics.rounds, output.sequences.tolist())\n"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rounds, text = run.stdout.strip().split(" ", 1)
    plain = tiny_target().generate(PROMPT, **KWARGS)
    assert json.loads(text) == plain.tolist() and int(rounds) > 0


def test_custom_generate_wants_a_hub_id(folders, tmp_path, capsys):
    common = ["export", f"{folders}/draft", "--to", "custom-generate", "--output", f"{tmp_path}/out", "--repo"]
    assert main([*common, str(tmp_path)]) == 1
    assert "owner/name" in capsys.readouterr().err
    assert main([*common, "org/tiny-draft"]) == 0
    assert "hf upload org/tiny-draft" in capsys.readouterr().out
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert {"generate.py", "requirements.txt", "model.safetensors", "config.json"} <= {p.name for p in files}
    assert not any(str(tmp_path).encode() in p.read_bytes() for p in files)
    assert AutoDraft.from_pretrained(tmp_path / "out").config.vocab_size == VOCAB
