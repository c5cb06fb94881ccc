# SPDX-License-Identifier: Apache-2.0
"""Drafts that FSDP2 splits: two ranks train as one process does, and what cannot be trained is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gto_hf import AutoDraft
from gto_hf.drafts import DraftPrefix
from gto_hf.trainer import sharded
from gto_hf.trainer.nonfinite import check_gradient
from gto_hf.trainer.place import place_target
from gto_hf.trainer.sharded import prepare_fsdp, whole
from tests.hub.online import TOKEN, USER
from tests.hub.server import Hub
from tests.tiny import tiny_draft, tiny_target
from tests.trainer.test_distributed import ROOT, launch, same_run, saved


WORKS = {
    "fsdp_version": 2,
    "state_dict_type": "FULL_STATE_DICT",
    "cpu_ram_efficient_loading": False,
    "auto_wrap_policy": "transformer_based_wrap",
}


def fsdp_trainer(**options):
    """As much of a trainer as is looked at before training."""
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**{**WORKS, **options}))
    accelerator = SimpleNamespace(state=state)
    return SimpleNamespace(accelerator=accelerator, is_fsdp_enabled=True, model=tiny_draft(tiny_target()))


# ---------------------------------------------------------------- two ranks
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_train_save_push_and_resume_as_one_process_does(tmp_path, monkeypatch, lora):
    target = tiny_target()
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    options = {
        "draft": str(tmp_path / "draft"),
        "lora": lora,
        "gto_weight": 0.5,
        "count": 16,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "evaluate_first": True,
    }
    (one,) = launch(tmp_path / "one", 1, **options)
    run = tmp_path / "two"
    with Hub({TOKEN: USER}) as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        options |= {"fsdp": True, "fsdp_config": {}}
        push = {"push_to_hub": True, "hub_model_id": f"{USER}/draft", "hub_token": TOKEN, "hub_strategy": "end"}
        first, second = launch(run, 2, **options, **push)
        assert first["wrapper"].startswith("FSDP")
        pushed = hub.store.repos["model", f"{USER}/draft"]
        files = list(pushed.commits.values())[-1][-1]
        (weights,) = [sha for path, sha in files.items() if path.endswith(".safetensors") and "/" not in path]
        uploaded = hub.store.blobs[weights]
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    same_run(one, first)
    # In every batch one rank has no group, so it calls the draft less often than the other one.
    steps = [entry for entry in first["logs"] if "token_loss" in entry]
    assert steps[0]["skipped_sequences"] == 2 and abs(steps[2]["gto/loss"]) > 0
    for figure in ("loss", "token_loss", "trained_tokens", "tau", "tau_chain", "decoding_rounds"):
        assert first["metrics"][f"eval_three_{figure}"] == pytest.approx(one["metrics"][f"eval_three_{figure}"])
    final = saved(run / "final")
    expected = saved(tmp_path / "one" / "final")
    assert set(final) == set(expected)
    for key, value in final.items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4, msg=key)
    (file,) = (run / "final").glob("*.safetensors")
    assert uploaded == file.read_bytes()
    loaded = AutoDraft.from_pretrained(run / "checkpoint-2", target=target)
    assert loaded.config.architectures == ["Eagle3Draft"] and not torch.equal(loaded.lm_head.weight, torch.zeros(1))
    launch(run, 2, **options, resume=str(run / "checkpoint-2"))
    for key, value in saved(run / "final").items():
        assert torch.equal(value, final[key]), key


# ---------------------------------------------------------------- one process
@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def attached():
    target = tiny_target()
    return tiny_draft(target).attach(target).requires_grad_(True)


def loss_of(draft, rows):
    """Any number that needs every parameter; `rows` forwards."""
    torch.manual_seed(3)
    total = 0.0
    for _ in range(rows):
        outputs = DraftPrefix(draft).extend(torch.randn(1, 5, 96), torch.randint(3, 64, (1, 5)), torch.arange(5)[None])
        total = total + draft.head(outputs).logsumexp(-1).sum()
    return total


def test_a_split_draft_is_an_ordinary_module_within(alone, attached):
    plain, called = copy.deepcopy(attached), []
    attached.norm.register_forward_hook(lambda *_: called.append(True))
    fully_shard(attached.norm)
    draft = fully_shard(attached)
    for rows in (2, 3):  # gradients of micro-batches are added up
        with whole(draft, gradients=True):
            assert not any(isinstance(p, DTensor) for p in draft.parameters())
            loss_of(draft, rows).backward()
        loss_of(plain, rows).backward()
    assert len(called) == 5  # hooks of others stay
    for (name, piece), parameter in zip(draft.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(piece, DTensor)
        torch.testing.assert_close(piece.grad.full_tensor(), parameter.grad, msg=name)
    # Outside, FSDP2's own hooks gather it again.
    given = torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, 32), torch.arange(5)[None], None
    seen = torch.ones(1, 5, 5, dtype=torch.bool)
    torch.testing.assert_close(draft(*given, seen).features, plain(*given, seen).features)


def test_an_error_leaves_the_draft_split_and_without_gradient(alone, attached):
    plain, draft = copy.deepcopy(attached), fully_shard(attached)
    with pytest.raises(FloatingPointError), whole(draft, gradients=True):
        loss_of(draft, 1).backward()
        raise FloatingPointError
    assert all(isinstance(p, DTensor) and p.grad is None for p in draft.parameters())
    with whole(draft, gradients=True):
        loss_of(draft, 2).backward()
    loss_of(plain, 2).backward()
    torch.testing.assert_close(draft.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad)


def test_rows_of_a_gradient_that_is_not_finite_are_named(alone, attached, tmp_path):
    draft = fully_shard(attached)

    def compute_loss(model, row):
        weight = model.lm_head.weight
        loss = loss_of(model, 1)
        # Zero, with the derivative of a square root at zero.
        return loss + (weight - weight.detach()).abs().sqrt().sum() if 9 in row["input_ids"] else loss

    trainer = SimpleNamespace(
        model=draft,
        accelerator=SimpleNamespace(scaler=None, mixed_precision="no", num_processes=1),
        is_deepspeed_enabled=False,
        compute_loss=compute_loss,
        train_dataset=None,
        state=SimpleNamespace(global_step=1),
        args=SimpleNamespace(output_dir=str(tmp_path), world_size=1),
        _needed_files=list,
        _prepare_inputs=lambda batch: batch,
    )
    ids = torch.tensor([[3, 4, 5], [3, 9, 5]])
    with pytest.raises(FloatingPointError, match=r"1 rows: micro-batch 0, row 1 of the batch: 3 tokens \[3, 9, 5\]"):
        check_gradient(trainer, float("nan"), [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert all(isinstance(p, DTensor) for p in draft.parameters())


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "options, named",
    [
        ({"fsdp_version": 1, "sharding_strategy": "FULL_SHARD"}, "FSDP1.*fsdp_version: 2"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "SHARDED_STATE_DICT.*from_pretrained.*FULL_STATE_DICT"),
        ({"cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading.*target's weights.*false"),
        ({"cpu_offload": True}, "fsdp_offload_params.*on the device.*false"),
        ({"activation_checkpointing": True}, "fsdp_activation_checkpointing.*trainer's `activation_checkpointing`"),
        ({"ignored_modules": "midlayer"}, "fsdp_ignored_modules: midlayer.*requires_grad"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_set(monkeypatch, options, named):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # plugins set it
    with pytest.raises(ValueError, match=named):
        place_target(tiny_target(), fsdp_trainer(**options))


def test_the_shipped_configuration_is_not_refused(monkeypatch):
    config = load_config_from_file(str(ROOT / "examples" / "accelerate" / "fsdp2.yaml")).fsdp_config
    for option, value in config.items():  # the launcher hands them on like this
        monkeypatch.setenv(option.upper(), str(value))
    trainer = fsdp_trainer(**dict.fromkeys(WORKS))
    prepare_fsdp(trainer)
    assert trainer.accelerator.state.fsdp_plugin.fsdp_version == 2


def test_a_draft_is_one_piece_in_its_own_precision(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    trainer = fsdp_trainer(mixed_precision_policy="bf16")
    prepare_fsdp(trainer)
    plugin = trainer.accelerator.state.fsdp_plugin
    assert plugin.auto_wrap_policy is None and plugin.mixed_precision_policy is None


def test_ranks_with_different_drafts_are_refused(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setattr(sharded, "gather_object", lambda found: [*found, "another"])
    with pytest.raises(ValueError, match="different drafts.*set_seed"):
        prepare_fsdp(fsdp_trainer())
