# SPDX-License-Identifier: Apache-2.0
"""Adapters on disk: loaded onto the base draft that they name, which is a Hub id wherever there is one."""

import json
import shutil
import types
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig
from safetensors.torch import load_file, save_file

from gto_hf import AutoDraft, DraftCheckpointError, TreeConfig
from gto_hf.checkpoints.files import lasting_name
from gto_hf.cli import main
from tests.checkpoints.test_safeailab import tensors, write
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows
from tests.trainer.helpers import make


HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with `base` and `adapter`, the target, and the draft with the adapter in training."""
    folder, target = tmp_path_factory.mktemp("adapters"), tiny_target()
    tiny_draft(target).save_pretrained(folder / "base")
    draft = AutoDraft.from_pretrained(folder / "base")
    return folder, target, trained(draft, target, folder / "adapter")


def trained(draft, target, folder):
    """Train an adapter for two steps and save it; returns the PEFT model."""
    rows = written_rows(target, 4, 20)
    trainer = make(
        draft, target, rows, folder, peft_config=LoraConfig(r=4, lora_alpha=64), max_steps=2, learning_rate=1e-2
    )
    trainer.train()
    trainer.save_model()
    return trainer.model


def adapter_config(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))
    return config


def cached(folder, cache, repository):
    """Put a folder into a Hub cache, as a download would."""
    root = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, root / "snapshots" / HASH)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(HASH)
    (root / ".no_exist" / HASH).mkdir(parents=True)
    for name in ("config.json", "adapter_config.json"):
        if not (folder / name).exists():
            (root / ".no_exist" / HASH / name).touch()
    return root / "snapshots" / HASH


def generate(target, draft):
    ids = torch.arange(3, 9)[None]
    return target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        max_new_tokens=20,
        return_dict_in_generate=True,
    )


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the adapter's folder that a test may damage."""
    return shutil.copytree(saved[0] / "adapter", tmp_path / "adapter")


# ---------------------------------------------------------------- loading
def test_an_adapter_loads_as_its_base_with_the_adapter_merged_in(saved):
    folder, target, model = saved
    draft = AutoDraft.from_pretrained(folder / "adapter", target=target)
    base = AutoDraft.from_pretrained(folder / "base")
    expected = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload().state_dict()
    assert set(draft.state_dict()) == set(expected) and not draft.training
    for key, value in draft.state_dict().items():
        assert torch.equal(value, expected[key]), key
    untouched = AutoDraft.from_pretrained(folder / "base").fc.weight
    assert (draft.fc.weight - untouched).abs().max() > 1e-3  # the adapter does something
    mine, theirs = generate(target, draft), generate(target, model)
    assert torch.equal(mine.sequences, theirs.sequences) and mine.statistics == theirs.statistics


def test_tree_dtype_and_base_can_be_given(saved, tmp_path):
    folder, target, _ = saved
    tree = TreeConfig(2, 3, 6)
    draft = AutoDraft.from_pretrained(folder / "adapter", target=target, tree=tree, dtype=torch.bfloat16)
    assert draft.tree == tree and draft.dtype == torch.bfloat16
    # merged before it is cast, so rounded once
    assert torch.equal(draft.fc.weight, AutoDraft.from_pretrained(folder / "adapter").fc.weight.bfloat16())
    assert AutoDraft.from_pretrained(folder / "adapter", dtype="bfloat16").dtype == torch.bfloat16
    expected = AutoDraft.from_pretrained(folder / "adapter").state_dict()
    moved = shutil.copytree(folder / "base", tmp_path / "elsewhere")
    for base in (moved, AutoDraft.from_pretrained(moved)):
        found = AutoDraft.from_pretrained(folder / "adapter", base=base, tree=tree)
        assert found.tree == tree and all(torch.equal(v, expected[k]) for k, v in found.state_dict().items())


def test_eval_reads_an_adapters_folder(saved, tmp_path, capsys):
    folder, target, _ = saved
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "ABCDEF"}))
    common = ["--target", f"{tmp_path}/target", "--sets", f"{tmp_path}/questions.jsonl", "--max-new-tokens", "8"]
    assert main(["eval", *common, "--draft", f"tuned={folder}/adapter", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "| tuned |" in out and "1 of 1" in out


def test_an_adapter_on_a_published_checkpoint_loads_again(tmp_path):
    target = tiny_target()
    write(tmp_path / "published", tensors())
    model = trained(AutoDraft.from_pretrained(tmp_path / "published", target=target), target, tmp_path / "adapter")
    assert adapter_config(tmp_path / "adapter")["base_model_name_or_path"] == str(tmp_path / "published")
    again = AutoDraft.from_pretrained(tmp_path / "adapter", target=target)
    assert generate(target, again).statistics == generate(target, model).statistics


# ---------------------------------------------------------------- the base's name
def test_an_adapter_names_its_base_by_hub_id_and_revision(saved, tmp_path):
    folder, target, _ = saved
    snapshot = cached(folder / "base", tmp_path / "cache", "org/draft")
    sources = (("org/draft", {"cache_dir": tmp_path / "cache"}), (snapshot, {}))
    for number, (source, kwargs) in enumerate(sources):
        out = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*in memory")
            model = trained(AutoDraft.from_pretrained(source, **kwargs), target, out)
        config = adapter_config(out)
        assert config["base_model_name_or_path"] == "org/draft" and config["revision"] == HASH
    # and from the Hub as well, with nothing local left but the cache
    cached(tmp_path / "0", tmp_path / "cache", "me/adapter")
    again = AutoDraft.from_pretrained("me/adapter", cache_dir=tmp_path / "cache", target=target)
    assert generate(target, again).statistics.tau == pytest.approx(generate(target, model).statistics.tau)
    assert again.name_or_path == "me/adapter" and again.config._commit_hash == HASH


def test_a_published_checkpoint_from_the_hub_is_named_by_its_id(tmp_path):
    target = tiny_target()
    cached(write(tmp_path / "published", tensors(), kind="safetensors"), tmp_path / "cache", "org/eagle")
    draft = AutoDraft.from_pretrained("org/eagle", cache_dir=tmp_path / "cache", revision="main", target=target)
    assert draft.name_or_path == draft.config.name_or_path == "org/eagle" and draft.config._commit_hash == HASH


def test_a_local_base_is_named_by_its_absolute_path_and_never_saved(saved, tmp_path, monkeypatch):
    folder, target, _ = saved
    monkeypatch.chdir(folder)
    draft = AutoDraft.from_pretrained("base", target=target)
    assert draft.name_or_path == str(folder / "base")
    draft.save_pretrained(tmp_path / "again")
    stored = (tmp_path / "again" / "config.json").read_text()
    assert str(folder) not in stored and "_commit_hash" not in stored
    assert adapter_config(folder / "adapter")["base_model_name_or_path"] == str(folder / "base")


def test_what_a_checkpoint_is_called(tmp_path):
    assert lasting_name("org/draft") == ("org/draft", None)
    assert lasting_name("org/draft", "v1") == ("org/draft", "v1")
    assert lasting_name(str(tmp_path), HASH) == (str(tmp_path), None)
    inner = tmp_path / "models--org--a-b" / "snapshots" / HASH / "inner"
    inner.mkdir(parents=True)
    assert lasting_name(str(inner.parent)) == ("org/a-b", HASH)
    assert lasting_name(str(inner)) == (str(inner), None)


def test_a_draft_made_in_memory_is_warned_about_at_the_start(saved, draft, llama, tmp_path):
    with pytest.warns(UserWarning, match="in memory"):
        trained(draft, llama, tmp_path / "out")
    assert adapter_config(tmp_path / "out")["base_model_name_or_path"] is None
    with pytest.raises(DraftCheckpointError, match="names no base draft.*base="):
        AutoDraft.from_pretrained(tmp_path / "out")


def push(trainer, monkeypatch):
    """Push without a Hub; returns what was said about the base draft."""
    uploads = []
    api = types.SimpleNamespace(upload_folder=lambda **kwargs: uploads.append(kwargs["folder_path"]))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: api)
    trainer.hub_model_id = "me/adapter"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.push_to_hub()
    assert len(uploads) == 1
    return [str(w.message) for w in caught if "base draft is" in str(w.message)]


def test_a_push_warns_if_nobody_else_finds_the_base(saved, tmp_path, monkeypatch):
    folder, target, _ = saved
    rows = Dataset.from_list(written_rows(target, 4, 20))
    cached(folder / "base", tmp_path / "cache", "org/draft")
    local, hub, whole = (
        make(AutoDraft.from_pretrained(source, **kwargs), target, rows, tmp_path / "out", peft_config=lora)
        for source, kwargs, lora in (
            (folder / "base", {}, LoraConfig(r=2)),
            ("org/draft", {"cache_dir": tmp_path / "cache"}, LoraConfig(r=2)),
            (folder / "base", {}, None),
        )
    )
    (message,) = push(local, monkeypatch)
    assert str(folder / "base") in message and "merge_and_unload" in message
    assert push(hub, monkeypatch) == [] and push(whole, monkeypatch) == []


# ---------------------------------------------------------------- what goes wrong
def test_a_base_that_is_not_here_is_named(saved, copied):
    adapter_config(copied, base_model_name_or_path="/nowhere/draft")
    with pytest.raises(DraftCheckpointError, match="/nowhere/draft.*no such folder.*base="):
        AutoDraft.from_pretrained(copied)
    adapter_config(copied, base_model_name_or_path="org/never-downloaded")
    with pytest.raises(DraftCheckpointError, match="org/never-downloaded.*cannot be loaded.*base="):
        AutoDraft.from_pretrained(copied)
    assert AutoDraft.from_pretrained(copied, base=saved[0] / "base").name_or_path == str(copied)


def test_an_adapter_of_a_language_model_is_not_taken_for_a_draft(saved, copied, tmp_path):
    saved[1].save_pretrained(tmp_path / "llm")
    adapter_config(copied, base_model_name_or_path=str(tmp_path / "llm"))
    with pytest.raises(DraftCheckpointError, match="no draft that gto-hf can read"):
        AutoDraft.from_pretrained(copied)


@pytest.mark.parametrize("damage, words", [
    ("missing", "1 tensors are missing.*lora_"),
    ("unknown", "1 tensors are unexpected.*lora_A"),
    ("shape", "(?s)cannot be put on.*size mismatch"),
    ("nan", "NaN"),
    ("cut", "adapter_model.safetensors.*cannot be read.*header"),
    ("kind", "fc.lora_A.*adapter_model.safetensors.*I8"),
    ("gone", "holds no weights.*adapter_model.safetensors"),
    ("pickle", "adapter_model.bin.*cannot be read"),
    ("field", "cannot be put on"),
    ("modules", "cannot be put on.*nothing_like_it"),
])  # fmt: skip
def test_a_damaged_adapter_is_refused(copied, damage, words):
    path = copied / "adapter_model.safetensors"
    content = load_file(path)
    name = next(key for key in content if "fc.lora_A" in key)
    if damage == "missing":
        del content[name]
    elif damage == "unknown":
        content[name.replace("fc", "other")] = content[name].clone()
    elif damage == "shape":
        content[name] = content[name][:, :-1].contiguous()
    elif damage == "nan":
        content[name][0, 0] = float("nan")
    elif damage == "kind":
        content[name] = content[name].to(torch.int8)
    save_file(content, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    if damage in ("gone", "pickle"):
        path.unlink()
    if damage == "pickle":
        (copied / "adapter_model.bin").write_bytes(b"(.")
    if damage == "field":
        adapter_config(copied, r="many")
    if damage == "modules":
        adapter_config(copied, target_modules=["nothing_like_it"])
    with pytest.raises(DraftCheckpointError, match=words):
        AutoDraft.from_pretrained(copied)


def test_folders_that_are_no_adapter_of_a_draft_say_why(saved, copied, tmp_path):
    with pytest.raises(ValueError, match="whole draft"):
        AutoDraft.from_pretrained(saved[0] / "base", base=saved[0] / "base")
    (copied / "adapter_config.json").write_text("{")
    with pytest.raises(DraftCheckpointError, match="adapter_config.json.*not JSON"):
        AutoDraft.from_pretrained(copied)
    prompts = PromptTuningConfig(num_virtual_tokens=2, base_model_name_or_path=str(saved[0] / "base"))
    prompts.save_pretrained(tmp_path / "prompts")
    with pytest.raises(DraftCheckpointError, match="prompts"):
        AutoDraft.from_pretrained(tmp_path / "prompts")
