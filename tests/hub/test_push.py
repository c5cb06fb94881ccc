# SPDX-License-Identifier: Apache-2.0
"""Drafts, adapters, checkpoints and data to the test Hub and back."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard, snapshot_download
from peft import LoraConfig

from gto_hf import AutoDraft, CausalLMDraft, DraftCheckpointError
from gto_hf.cli import main
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows
from tests.trainer.helpers import make

from .online import TOKEN, hub, online


def everything(name):
    """Path and content of every file of every commit of a repository."""
    repo = hub().store.repos["model", name]
    return {
        (path, sha): hub().store.blobs[sha] for _, _, files in repo.commits.values() for path, sha in files.items()
    }


def assert_nothing_leaked(name, *paths):
    """No file that was ever pushed holds an absolute path of this machine, a token, or the machine's name."""
    secrets = [TOKEN, tempfile.gettempdir() + "/", os.getcwd(), str(Path.home()) + "/", *map(str, paths)]
    machine = re.compile(rb"(?<![A-Za-z0-9_.-])" + re.escape(socket.gethostname().encode()) + rb"(?![A-Za-z0-9_.-])")
    found = everything(name)
    assert len(found) >= 3
    for (path, _), content in found.items():
        for secret in secrets:
            assert secret.encode() not in content, (path, secret)
        if not path.endswith((".safetensors", ".png", ".pt")):  # any short name occurs in numbers
            assert not machine.search(content), path


def equal(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    assert set(mine) == set(theirs)
    return all(torch.equal(value, theirs[key]) for key, value in mine.items())


def run(draft, target, folder, **kwargs):
    """A trainer that pushes, after its training."""
    rows = written_rows(target, 6, 20)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2, **kwargs}
    trainer = make(draft, target, rows, folder, push_to_hub=True, hub_token=TOKEN, hub_always_push=True, **options)
    trainer.train()
    return trainer


# ---------------------------------------------------------------- a draft
@online
def test_a_draft_comes_back_from_the_hub_with_a_card(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    draft.push_to_hub("me/draft")
    again = AutoDraft.from_pretrained("me/draft", target=target)
    assert equal(draft, again) and again.tree == draft.tree and again.name_or_path == "me/draft"
    card = ModelCard.load("me/draft")
    assert card.data.to_dict()["library_name"] == "gto-hf" and "speculative-decoding" in card.data.tags
    assert 'AutoDraft.from_pretrained("me/draft")' in card.text and "not been measured" in card.text
    assert_nothing_leaked("me/draft")
    assert hub().unknown == []


@online
def test_save_pretrained_pushes_the_same_card(tmp_path):
    draft = tiny_draft(tiny_target())
    draft.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved")
    assert equal(draft, AutoDraft.from_pretrained("me/saved"))
    assert "not been measured" in ModelCard.load("me/saved").text
    assert_nothing_leaked("me/saved")


@online
def test_a_written_card_stays_and_old_figures_do_not(tmp_path):
    draft = tiny_draft(tiny_target())
    HfApi().create_repo("me/own-words")
    ModelCard("---\nlicense: mit\n---\n# My own words\n").push_to_hub("me/own-words")
    draft.push_to_hub("me/own-words")
    assert ModelCard.load("me/own-words").text.strip() == "# My own words"
    draft.push_to_hub("me/again", tags=["mine"])
    card = ModelCard.load("me/again")
    card.data.license, card.text = "mit", card.text.replace("have not been measured", "were 9.99")
    card.push_to_hub("me/again")
    draft.push_to_hub("me/again")  # other weights, for all that the card knows
    card = ModelCard.load("me/again")
    assert card.data.license == "mit" and "mine" in card.data.tags and "9.99" not in card.text


@online
def test_a_revision_is_pinned(tmp_path):
    target = tiny_target()
    first, second = tiny_draft(target, seed=1), tiny_draft(target, seed=2)
    first.push_to_hub("me/pinned-draft")
    commit = HfApi().model_info("me/pinned-draft").sha
    second.push_to_hub("me/pinned-draft")
    before = len(hub().log)
    assert equal(AutoDraft.from_pretrained("me/pinned-draft"), second)
    asked = [line for line in hub().log[before:] if "/resolve/" in line]
    newest = HfApi().model_info("me/pinned-draft").sha  # the weights are those of the config's commit
    assert asked and all(f"/resolve/{newest}/" in line for line in asked if "config.json" not in line)
    assert any("model.safetensors" in line for line in asked)
    old = AutoDraft.from_pretrained("me/pinned-draft", revision=commit)
    assert equal(old, first) and old.config._commit_hash == commit
    second.push_to_hub("me/pinned-draft", revision="side")  # a branch of its own
    assert equal(AutoDraft.from_pretrained("me/pinned-draft", revision="side"), second)
    with pytest.raises((OSError, DraftCheckpointError), match="not a valid git identifier|nowhere"):
        AutoDraft.from_pretrained("me/pinned-draft", revision="nowhere")


@online
def test_a_private_draft_needs_its_owners_token(tmp_path):
    draft = tiny_draft(tiny_target())
    draft.push_to_hub("me/private", private=True)
    for number, token in enumerate((False, "hf_ofSomebodyElse")):
        with pytest.raises((OSError, DraftCheckpointError), match="me/private"):
            AutoDraft.from_pretrained("me/private", token=token, cache_dir=tmp_path / str(number))
    assert equal(AutoDraft.from_pretrained("me/private", token=TOKEN, cache_dir=tmp_path / "mine"), draft)


@online
def test_the_cache_is_used_again_and_is_enough_without_a_network(tmp_path):
    draft = tiny_draft(tiny_target())
    draft.push_to_hub("me/cached")
    AutoDraft.from_pretrained("me/cached")
    before = len(hub().log)
    assert equal(AutoDraft.from_pretrained("me/cached"), draft)
    assert not [line for line in hub().log[before:] if line.startswith("GET") and ("resolve" in line or "cdn" in line)]
    before = len(hub().log)
    assert equal(AutoDraft.from_pretrained("me/cached", local_files_only=True), draft)
    assert len(hub().log) == before
    with pytest.raises((OSError, DraftCheckpointError), match="me/never"):
        AutoDraft.from_pretrained("me/never", local_files_only=True)
    # HF_HUB_OFFLINE is read when the library is imported
    code = "from gto_hf import AutoDraft; print(AutoDraft.from_pretrained('me/cached').config.draft_type)"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert out.stdout.strip() == "eagle3", out.stderr
    assert len(hub().log) == before


@online
def test_a_language_model_as_draft_comes_back(tmp_path):
    target, small = tiny_target(), tiny_target(seed=3)
    small.save_pretrained(tmp_path / "small")
    small = type(small).from_pretrained(tmp_path / "small")
    draft = CausalLMDraft(small, target=target)
    draft.push_to_hub("me/small")
    assert equal(AutoDraft.from_pretrained("me/small", target=target), draft)
    assert "export" not in ModelCard.load("me/small").text  # no server takes one as an export
    assert_nothing_leaked("me/small")


# ---------------------------------------------------------------- an adapter
@online
def test_an_adapter_finds_its_base_on_the_hub_at_its_revision(tmp_path):
    target = tiny_target()
    base = tiny_draft(target, seed=1)
    base.push_to_hub("me/base")
    commit = HfApi().model_info("me/base").sha
    loaded = AutoDraft.from_pretrained("me/base", target=target)
    trainer = run(
        loaded,
        target,
        tmp_path / "adapter",
        peft_config=LoraConfig(r=2),
        hub_model_id="me/adapter",
        learning_rate=1e-2,
    )
    trainer.push_to_hub(dataset_name=f"{tmp_path}/rows.jsonl")
    tiny_draft(target, seed=9).push_to_hub("me/base")  # the base moves on
    config = json.loads(hub().store.content("model", "me/adapter", "adapter_config.json"))
    assert config["base_model_name_or_path"] == "me/base" and config["revision"] == commit
    again = AutoDraft.from_pretrained("me/adapter", target=target)
    expected = trainer.model.merge_and_unload()
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key])
    assert not torch.equal(again.fc.weight, base.fc.weight)
    card = ModelCard.load("me/adapter")
    assert card.data.to_dict()["library_name"] == "peft" and card.data.base_model == "me/base"
    assert card.data.base_model_relation == "adapter" and card.data.datasets is None
    assert_nothing_leaked("me/adapter")


@online
def test_an_adapter_on_a_folder_is_pushed_without_its_path(tmp_path):
    target = tiny_target()
    tiny_draft(target).save_pretrained(tmp_path / "base")
    loaded = AutoDraft.from_pretrained(tmp_path / "base")
    options = {"peft_config": LoraConfig(r=2), "hub_model_id": "me/local-base", "hub_strategy": "all_checkpoints"}
    with pytest.warns(UserWarning, match="nobody else can load"):
        trainer = run(loaded, target, tmp_path / "out", **options)
    trainer.push_to_hub()
    names = {path for path, _ in everything("me/local-base")}
    assert {"adapter_config.json", "checkpoint-2/adapter_config.json", "checkpoint-1/trainer_state.json"} <= names
    assert_nothing_leaked("me/local-base")
    with pytest.raises(DraftCheckpointError, match="names no base draft.*base="):
        AutoDraft.from_pretrained("me/local-base")
    AutoDraft.from_pretrained("me/local-base", base=tmp_path / "base")
    AutoDraft.from_pretrained("me/local-base", base=tmp_path / "base", subfolder="checkpoint-1")
    # what stays here still knows its base
    local = json.loads((tmp_path / "out" / "checkpoint-2" / "adapter_config.json").read_text())
    assert local["base_model_name_or_path"] == str(tmp_path / "base")


# ---------------------------------------------------------------- training that pushes
def folders(name):
    repo = hub().store.repos["model", name]
    return {path.split("/")[0] for path in repo.files("main") if "/" in path}


@online
def test_every_hub_strategy_pushes_what_it_promises(tmp_path):
    target = tiny_target()
    expected = {
        "end": set(),
        "every_save": set(),
        "checkpoint": {"last-checkpoint"},
        "all_checkpoints": {"checkpoint-1", "checkpoint-2"},
    }
    for strategy, pushed in expected.items():
        name = f"me/{strategy}"
        draft = tiny_draft(target)
        trainer = run(draft, target, tmp_path / strategy, hub_model_id=name, hub_strategy=strategy)
        during = len(hub().store.repos["model", name].history("main")) - 1
        assert (during > 0) == (strategy != "end")
        trainer.push_to_hub(license="apache-2.0")
        titles = [title for _, title in hub().store.repos["model", name].history("main")]
        assert titles[0] == "End of training" and titles[-1] == "initial commit"
        assert folders(name) - {"report"} == pushed
        again = AutoDraft.from_pretrained(name, target=target)
        assert equal(again, draft)
        if strategy == "all_checkpoints":
            one = AutoDraft.from_pretrained(name, subfolder="checkpoint-1", target=target)
            assert not equal(one, draft)
        card = ModelCard.load(name)
        assert card.data.license == "apache-2.0" and "| trained tokens |" in card.text
        assert not list((tmp_path / strategy).glob("_push-*"))
        assert_nothing_leaked(name)
    assert hub().unknown == []


@online
def test_a_run_resumes_from_a_pulled_checkpoint(tmp_path):
    target = tiny_target()
    tiny_draft(target).save_pretrained(tmp_path / "start")
    rows = written_rows(target, 8, 20)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "seed": 5}

    def trainer(folder, **kwargs):
        return make(str(tmp_path / "start"), target, rows, folder, **options, **kwargs)

    whole = trainer(
        tmp_path / "whole", push_to_hub=True, hub_model_id="me/resumed", hub_strategy="checkpoint", hub_token=TOKEN,
        hub_always_push=True, eval_rows=Dataset.from_list(rows), eval_strategy="steps", eval_steps=2, eval_prompts=2,
        eval_max_new_tokens=8, load_best_model_at_end=True, metric_for_best_model="step", greater_is_better=True,
        save_total_limit=1,
    )  # fmt: skip
    whole.evaluate = lambda *args, **kwargs: {"eval_step": whole.state.global_step} | type(whole).evaluate(whole)
    whole.train()
    whole._finish_current_push()
    history = {title: commit for commit, title in hub().store.repos["model", "me/resumed"].history("main")}
    early = history["Training in progress, step 2, checkpoint"]
    state = json.loads(hub().store.content("model", "me/resumed", "last-checkpoint/trainer_state.json", early))
    assert state["global_step"] == 2 and state["best_model_checkpoint"] == "checkpoint-2"
    pulled = snapshot_download(
        "me/resumed", allow_patterns="last-checkpoint/*", local_dir=tmp_path / "pulled", revision=early
    )
    going_on = trainer(tmp_path / "pulled")
    going_on.train(resume_from_checkpoint=f"{pulled}/last-checkpoint")
    assert going_on.state.global_step == 4
    assert equal(going_on.model, whole.model)
    assert_nothing_leaked("me/resumed")


@online
def test_a_failed_push_is_said_and_leaves_nothing_behind(tmp_path):
    target = tiny_target()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gto_hf.trainer.push").addHandler(handler)
    rows = written_rows(target, 4, 20)
    trainer = make(
        tiny_draft(target), target, rows, tmp_path / "out", push_to_hub=True, hub_model_id="me/gone", hub_token=TOKEN,
        max_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    del hub().store.repos["model", "me/gone"]
    trainer.train()
    trainer._finish_current_push()
    for _ in range(100):
        if not list((tmp_path / "out").glob("_push-*")):
            break
        time.sleep(0.05)
    assert not list((tmp_path / "out").glob("_push-*")) and any("push to the Hub failed" in text for text in said)
    assert AutoDraft.from_pretrained(tmp_path / "out" / "checkpoint-1")


# ---------------------------------------------------------------- from the command line
@online
def test_the_train_command_takes_its_data_from_the_hub_and_pushes(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_draft(target).push_to_hub("me/start")
    Dataset.from_list(written_rows(target, 6, 24)).push_to_hub("me/answers", private=True)
    code = main([
        "train", "--model_name_or_path", "me/start", "--target_model_name_or_path", f"{tmp_path}/target",
        "--dataset_name", "me/answers", "--max_steps", "1", "--bf16", "False", "--report_to", "none", "--tree_depth", "3",
        "--tree_top_k", "3", "--tree_total_tokens", "8", "--group_size", "3", "--disable_tqdm", "True",
        "--output_dir", f"{tmp_path}/out", "--push_to_hub", "True", "--hub_model_id", "me/trained", "--hub_token", TOKEN,
        "--target_model_init_kwargs", json.dumps({"token": TOKEN}),
    ])  # fmt: skip
    assert code == 0
    card = ModelCard.load("me/trained")
    assert card.data.datasets == "me/answers" and card.data.base_model == "me/start"
    assert "`me/start`" in card.text
    assert_nothing_leaked("me/trained")
    assert AutoDraft.from_pretrained("me/trained", target=target).name_or_path == "me/trained"
    assert hub().unknown == []
