# SPDX-License-Identifier: Apache-2.0
"""What is kept of the frozen models' answers changes the cost of a run, not its result."""

import copy
import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from gto_hf.gto import FeatureStore, RowStore
from tests.families import FAMILIES
from tests.tiny import tiny_draft
from tests.trainer.helpers import logs_with, make, state  # noqa: F401 - a fixture


class _Calls:
    """Tokens that went through a model."""

    def __init__(self, model):
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.tokens += kwargs["input_ids"].numel()


def trained(draft, target, rows, folder, **kwargs):  # noqa: F811
    trainer = make(draft, target, rows, folder, per_device_train_batch_size=2, **kwargs)
    trainer.train()
    return trainer


# ---------------------------------------------------------------- features
def test_stored_features_train_the_same_draft_without_the_target(llama, rows, tmp_path):  # noqa: F811
    options = {"gto_weight": 0.0, "num_train_epochs": 2}
    plain = trained(tiny_draft(llama), llama, rows, tmp_path / "a", **options)
    calls = _Calls(llama)
    first = trained(tiny_draft(llama), llama, rows, tmp_path / "b", features_path=str(tmp_path / "f"), **options)
    once = sum(len(row["input_ids"]) for row in rows)
    assert once <= calls.tokens <= 2 * once  # one epoch of forwards, padding and the probe included
    calls.tokens = 0
    again = trained(tiny_draft(llama), llama, rows, tmp_path / "c", features_path=str(tmp_path / "f"), **options)
    assert calls.tokens <= 2 * 24  # the first batch says what the head is
    for other in (first, again):
        for key, value in plain.model.state_dict().items():
            torch.testing.assert_close(other.model.state_dict()[key], value, atol=1e-5, rtol=1e-4, msg=key)
        assert logs_with(other, "token_loss") == pytest.approx(logs_with(plain, "token_loss"), rel=1e-4)


def test_rows_that_are_trained_on_elsewhere_are_stored_too(llama, rows, tmp_path):  # noqa: F811
    options = {"gto_weight": 0.0, "num_train_epochs": 1, "features_path": str(tmp_path / "f")}
    cut = [{**row, "labels": [-100] * 12 + list(row["input_ids"][12:])} for row in rows]
    assert cut != rows
    trained(tiny_draft(llama), llama, rows, tmp_path / "a", **options)
    trained(tiny_draft(llama), llama, cut, tmp_path / "b", **options)
    calls = _Calls(llama)
    for name, some in (("c", cut), ("d", rows)):
        trained(tiny_draft(llama), llama, some, tmp_path / name, **options)
    assert calls.tokens <= 4 * 24  # the first batch of each run says what the head is


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "granite"])
def test_features_of_targets_with_caps_and_factors(name, rows, tmp_path):  # noqa: F811
    target = FAMILIES[name].build()
    if name == "granite":
        target.config.logits_scaling = 4.0
    if name == "cohere2":
        target.logit_scale = target.config.logit_scale = 0.5
    options = {"gto_weight": 0.0, "max_steps": 3}
    plain = trained(tiny_draft(target), target, rows, tmp_path / "a", **options)
    kept = trained(tiny_draft(target), target, rows, tmp_path / "b", features_path=str(tmp_path / "f"), **options)
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(kept.model.state_dict()[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_a_target_whose_head_is_not_understood_trains_but_cannot_be_stored(rows, tmp_path):  # noqa: F811
    target = FAMILIES["gemma3n_text"].build()
    trainer = trained(tiny_draft(target), target, rows, tmp_path / "a", gto_weight=0.0, max_steps=1)
    assert len(logs_with(trainer, "token_loss")) == 1
    with pytest.raises(ValueError, match="features_path"):
        trained(
            tiny_draft(target), target, rows, tmp_path / "b", gto_weight=0.0, max_steps=1, features_path=str(tmp_path)
        )


def test_the_size_is_announced_and_a_full_disk_refused(llama, draft, rows, tmp_path, monkeypatch, caplog):  # noqa: F811
    import shutil

    from transformers.utils import logging

    logging.get_logger("transformers").propagate = True
    make(draft, llama, rows, tmp_path / "a", gto_weight=0.0, features_path=str(tmp_path / "f"))
    tokens = sum(len(row["input_ids"]) for row in rows)
    per_token = FeatureStore.bytes_per_token(list(draft.config.feature_layers), llama)
    assert f"{tokens:,} tokens of {per_token:,} bytes" in caplog.text
    make(
        draft,
        llama,
        rows,
        tmp_path / "c",
        eval_rows=Dataset.from_list(rows[:3]),
        gto_weight=0.0,
        features_path=str(tmp_path / "f"),
    )
    tokens += sum(len(row["input_ids"]) for row in rows[:3])
    assert f"{tokens:,} tokens of {per_token:,} bytes" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ValueError, match="features_path.*free"):
        make(draft, llama, rows, tmp_path / "b", gto_weight=0.0, features_path=str(tmp_path / "g"))


def test_the_announced_size_is_that_of_the_files(llama, draft, rows, tmp_path, caplog):  # noqa: F811
    """Within 5 %: beside the tensors a file names them."""
    from transformers.utils import logging

    logging.get_logger("transformers").propagate = True
    options = {"gto_weight": 0.0, "num_train_epochs": 1, "features_path": str(tmp_path / "f")}
    trained(draft, llama, rows, tmp_path / "a", **options)
    tokens, each = re.search(r"([\d,]+) tokens of ([\d,]+) bytes", caplog.text).groups()
    announced = int(tokens.replace(",", "")) * int(each.replace(",", ""))
    written = sum(path.stat().st_size for path in (tmp_path / "f").iterdir())
    assert written == pytest.approx(announced, rel=0.05)


def test_features_have_no_use_with_trees(llama, draft, rows, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="features_path.*gto_weight"):
        make(draft, llama, rows, tmp_path, gto_weight=0.5, features_path=str(tmp_path / "f"))


# ---------------------------------------------------------------- the reference's trees
GRID = {"group_positions": "grid", "gto_weight": 0.5, "num_train_epochs": 3, "logging_steps": 4, "learning_rate": 1e-4}


def test_the_references_trees_are_scored_once(llama, rows, tmp_path):  # noqa: F811
    """Later epochs forward fewer nodes and give the same rewards as a run that forgets."""
    kept = trained(tiny_draft(llama), llama, rows, tmp_path / "a", **GRID)
    calls = logs_with(kept, "gto/target_nodes")
    assert calls[1] < 0.7 * calls[0] and calls[2] < 0.7 * calls[0]

    forgets = make(tiny_draft(llama), llama, rows, tmp_path / "b", per_device_train_batch_size=2, **GRID)
    forgets.term.memory = None
    forgets.train()
    assert logs_with(forgets, "gto/target_nodes")[1] > calls[1]
    for key in ("reward/draft", "reward/reference", "expected_acceptance/draft", "gto/ratio", "loss"):
        assert logs_with(kept, key) == pytest.approx(logs_with(forgets, key), rel=1e-3, abs=1e-5), key
    for key, value in forgets.model.state_dict().items():
        torch.testing.assert_close(kept.model.state_dict()[key], value, atol=1e-4, rtol=1e-3, msg=key)


def test_a_second_run_from_the_same_reference_starts_with_its_trees(llama, rows, tmp_path):  # noqa: F811
    path = str(tmp_path / "trees")
    first = trained(tiny_draft(llama), llama, rows, tmp_path / "a", reference_path=path, **GRID)
    second = trained(tiny_draft(llama), llama, rows, tmp_path / "b", reference_path=path, **GRID)
    assert logs_with(second, "gto/target_nodes")[0] < 0.7 * logs_with(first, "gto/target_nodes")[0]
    with pytest.raises(ValueError, match="reference draft"):
        make(tiny_draft(llama, seed=2), llama, rows, tmp_path / "c", reference_path=path, **GRID)


def test_at_the_reference_remembered_trees_give_no_advantage_in_half_precision(llama, rows, tmp_path):  # noqa: F811
    """Equal nodes get equal bits, also from an earlier epoch: rounding must not pass for a reward."""
    target = llama.to(torch.bfloat16)
    trainer = trained(tiny_draft(target), target, rows, tmp_path, **{**GRID, "learning_rate": 0.0})
    assert logs_with(trainer, "gto/advantage_abs") == [0.0, 0.0, 0.0]
    assert logs_with(trainer, "gto/target_nodes")[1] == 0


# ---------------------------------------------------------------- rows on disk
def test_rows_are_found_again_and_half_written_files_ignored(tmp_path):
    store = RowStore(tmp_path, {"a": 1})
    store.put("x", {"v": torch.arange(3)})
    assert "x" in store and len(store) == 1 and not list(tmp_path.glob("*.safetensors"))
    store.flush()
    (tmp_path / "dead.part").write_bytes(b"half")
    again = RowStore(tmp_path, {"a": 1})
    assert torch.equal(again.get("x")["v"], torch.arange(3)) and again.get("y") is None
    again.put("x", {"v": torch.zeros(3)})  # what is there stays
    again.flush()
    assert torch.equal(RowStore(tmp_path, {"a": 1}).get("x")["v"], torch.arange(3))
    (shard,) = tmp_path.glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        assert list(file.keys()) == ["x/v"]


def test_processes_share_a_folder(tmp_path):
    mine, theirs = RowStore(tmp_path, {}), RowStore(tmp_path, {})
    mine.put("a", {"v": torch.zeros(2)})
    theirs.put("a", {"v": torch.ones(2)})  # both were asked for the same row
    theirs.put("b", {"v": torch.ones(2)})
    mine.flush()
    theirs.flush()
    assert "b" not in mine
    mine.flush()
    assert torch.equal(mine.get("b")["v"], torch.ones(2)) and len(mine) == len(theirs) == 2
    assert RowStore(tmp_path, {}).get("a")["v"].unique().numel() == 1


def test_a_store_of_other_models_is_refused(tmp_path):
    RowStore(tmp_path, {"target": {"hidden_size": 8}, "tree": [1]})
    with pytest.raises(ValueError, match="hidden_size.*16.*another folder"):
        RowStore(tmp_path, {"target": {"hidden_size": 16}, "tree": [1]})


# ---------------------------------------------------------------- rows that are not alike
@pytest.fixture
def uneven(rows):  # noqa: F811
    """Prompts and answers of many lengths; one row is too short for a group."""
    made = []
    for i, row in enumerate(rows):
        ids, prompt = row["input_ids"][: 24 - 2 * (i % 4)], 3 + i
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    made[0] = {key: values[:6] for key, values in made[0].items()}
    return made


def test_features_of_uneven_rows_are_read_once(llama, uneven, tmp_path):
    """Whatever batch a row was stored in, later batches of other rows find it."""
    options = {"gto_weight": 0.0, "num_train_epochs": 4}
    plain = trained(tiny_draft(llama), llama, uneven, tmp_path / "a", **options)
    calls = _Calls(llama)
    kept = trained(tiny_draft(llama), llama, uneven, tmp_path / "b", features_path=str(tmp_path / "f"), **options)
    assert calls.tokens <= 8 * 24 + 8  # one epoch, with padding, and the probe
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(kept.model.state_dict()[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_the_references_trees_of_uneven_rows_are_scored_once(llama, uneven, tmp_path):
    options = {**GRID, "learning_rate": 0.0, "num_train_epochs": 4}
    kept = trained(tiny_draft(llama), llama, uneven, tmp_path / "a", **options)
    assert logs_with(kept, "gto/target_nodes")[1:] == [0.0, 0.0, 0.0]
    assert logs_with(kept, "gto/advantage_abs") == [0.0] * 4
    lengths = logs_with(kept, "accepted_length")
    assert lengths[0] > 0 and lengths == pytest.approx([lengths[0]] * 4)


def test_stores_of_adapted_targets_and_other_precisions_are_told_apart(llama, rows, tmp_path):  # noqa: F811
    def adapted(seed):
        torch.manual_seed(seed)
        return get_peft_model(
            copy.deepcopy(llama), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )

    options = {"gto_weight": 0.0, "max_steps": 1, "features_path": str(tmp_path / "f")}
    make(tiny_draft(llama), adapted(0), rows, tmp_path / "a", **options)
    with pytest.raises(ValueError, match="target"):
        make(tiny_draft(llama), adapted(1), rows, tmp_path / "b", **options)
    options = {**GRID, "reference_path": str(tmp_path / "t")}
    make(tiny_draft(llama), llama, rows, tmp_path / "c", **options)
    with pytest.raises(ValueError, match="precision"):
        make(tiny_draft(llama), llama, rows, tmp_path / "d", bf16=True, **options)


def test_remembered_trees_stay_out_of_a_push(llama, rows, tmp_path):  # noqa: F811
    trained(tiny_draft(llama), llama, rows, tmp_path, **GRID)
    (folder,) = [path.parent for path in tmp_path.rglob("facts.json")]
    assert folder.parent == tmp_path and folder.name.startswith("_")
