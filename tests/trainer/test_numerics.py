# SPDX-License-Identifier: Apache-2.0
"""Half precision against float32, and what happens when something is NaN or infinite."""

import copy
import functools

import pytest
import torch
from datasets import Dataset

from gto_hf import GTOConfig, GTOTrainer
from gto_hf.gto import row_generators, row_seeds, sample_groups
from gto_hf.trainer.nonfinite import _last_checkpoint as last_checkpoint
from tests.tiny import tiny_tokenizer, written_rows


BAD = 60  # a token that only the broken row holds


@pytest.fixture
def rows(llama):
    rows = written_rows(llama, 8, 24)
    for number, row in enumerate(rows):
        row["input_ids"] = [i if i != BAD else 59 for i in row["input_ids"]]
        row["labels"] = [i if i != BAD else 59 for i in row["labels"]]
        row["source"] = f"file-{number}"
    rows[5]["input_ids"][3] = BAD  # in the prompt
    return rows


def make(draft, target, rows, folder, **kwargs):
    options = {
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_groups": 2, "group_size": 3, "tree_depth": 3,
        "tree_top_k": 3, "tree_total_tokens": 8, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "shuffle_dataset": False,
        "train_sampling_strategy": "sequential", "max_steps": 2,
    }  # fmt: skip
    args = GTOConfig(str(folder), **{**options, **kwargs})
    return GTOTrainer(draft, target, args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer())


# ---------------------------------------------------------------- half precision
def gradient(trainer, rows, *, autocast=None, scale=1.0):
    """Loss and flat gradient of one batch, away from the reference."""
    torch.manual_seed(7)
    for p in trainer.model.parameters():
        p.data.add_(torch.randn_like(p) * 0.05)
    if autocast is not None:
        trainer.accelerator.autocast = functools.partial(torch.autocast, "cpu", autocast)
    batch = trainer.data_collator([{k: row[k] for k in ("input_ids", "labels")} for row in rows])
    loss = trainer.compute_loss(trainer.model, batch)
    (loss * scale).backward()
    return loss.item(), torch.cat([p.grad.flatten() / scale for p in trainer.model.parameters()])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole_target", [True, False])
def test_half_precision_gives_the_gradient_of_float32(llama, draft, rows, tmp_path, half, whole_target):
    # float16 is run under torch's own autocast with a loss scale: accelerate has none on a CPU.
    target = copy.deepcopy(llama) if whole_target else copy.deepcopy(llama).to(half)
    exact, rough = make(copy.deepcopy(draft), llama, rows, tmp_path), make(draft, target, rows, tmp_path)
    # Rounding may choose other trees among near-ties, which is another objective; so both runs follow one plan.
    plan = exact._plan
    plans = []
    exact._plan = lambda *args: plans.append(plan(*args)) or plans[0]
    rough._plan = lambda *args: plans[0]
    loss, grad = gradient(exact, rows)
    assert plans[0].advantages.abs().sum() > 0
    other, found = gradient(rough, rows, autocast=half, scale=1024.0 if half is torch.float16 else 1.0)
    assert torch.isfinite(found).all() and all(p.dtype == torch.float32 for p in draft.parameters())
    assert other == pytest.approx(loss, rel=0.03)
    assert torch.cosine_similarity(grad, found, dim=0) > 0.98
    assert found.norm().item() == pytest.approx(grad.norm().item(), rel=0.05)


@pytest.mark.parametrize("options", [{}, {"bf16": True}])
def test_training_and_checkpoints_in_each_precision(llama, draft, rows, tmp_path, options):
    trainer = make(draft, llama, rows, tmp_path, max_steps=3, **options)
    trainer.train()
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in draft.parameters())
    assert len([e for e in trainer.state.log_history if "gto/ratio" in e]) == 3


def test_the_reference_follows_a_draft_that_the_backend_casts(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, max_steps=1)
    trainer.model.bfloat16()  # as DeepSpeed does
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["gto/ratio"] == 1.0 and first["gto/advantage_abs"] == 0.0


def test_float16_on_a_cpu_says_that_it_is_none(llama, draft, rows, tmp_path):
    with pytest.warns(UserWarning, match="fp16.*float32"):
        trainer = make(draft, llama, rows, tmp_path, max_steps=1, fp16=True)
    trainer.train()
    assert trainer.accelerator.scaler is None


# ---------------------------------------------------------------- NaN and infinity
def stops(trainer):
    """The message with which training stops; the draft must be as it was after the last checkpoint."""
    with pytest.raises(FloatingPointError) as stop:
        trainer.train()
    return str(stop.value)


def names_only_row_five(message):
    assert "1 of 4 rows: row 1 of the batch" in message or "1 rows: micro-batch 0, row 1 of the batch" in message
    assert "row 5 of the prepared dataset, source='file-5'" in message and f", {BAD}, " in message


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_target_that_overflows_is_named_with_the_row(llama, draft, rows, tmp_path, weight):
    with torch.no_grad():
        llama.model.embed_tokens.weight[BAD] = 1e5  # more than float16 holds
    trainer = make(draft, llama.half(), rows, tmp_path, gto_weight=weight)
    message = stops(trainer)
    assert "at step 1: the target's features (in float16)" in message and "bfloat16" in message
    assert "The last checkpoint is checkpoint-1." in message
    names_only_row_five(message)
    assert trainer.state.global_step == 1 and all(torch.isfinite(p).all() for p in draft.parameters())


def test_nan_in_a_target_of_full_precision_names_the_target_and_every_row(llama, draft, rows, tmp_path):
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    message = stops(make(draft, llama, rows, tmp_path, gto_weight=0.0))
    assert "the target's features" in message and "4 of 4 rows" in message and "No checkpoint" in message
    assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())


def test_nan_in_the_targets_head_is_not_blamed_on_the_draft(llama, draft, rows, tmp_path):
    with torch.no_grad():
        llama.lm_head.weight[0, 0] = float("nan")
    assert "the target's logits" in stops(make(draft, llama, rows, tmp_path))


class _Breaks(torch.nn.Module):
    """A pre-hook of the draft's layer that breaks the rows whose embeddings hold the token `BAD`."""

    def __init__(self, target, how):
        super().__init__()
        self.row, self.how = target.get_input_embeddings().weight[BAD].detach(), how

    def forward(self, module, args):
        embeddings, features, *rest = args
        bad = (embeddings == self.row).all(-1).any(-1)
        features = features.clone()
        if self.how == "value":
            features[bad] = float("inf")
        elif bool(bad.any()):
            # Zero, with the derivative of a square root at zero.
            features[bad] = features[bad] + (features[bad] - features[bad].detach()).abs().sqrt()
        return embeddings, features, *rest


@pytest.mark.parametrize("weight, size, steps", [(0.5, 4, 1), (0.0, 2, 2)])
def test_a_gradient_that_is_not_finite_stops_before_the_update(llama, draft, rows, tmp_path, weight, size, steps):
    trainer = make(
        draft, llama, rows, tmp_path, gto_weight=weight, per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
    )  # fmt: skip
    draft.midlayer.register_forward_pre_hook(_Breaks(llama, "gradient"))
    after_first = {}
    save = trainer._save_checkpoint

    def saved(*args):
        after_first.update({k: v.clone() for k, v in draft.state_dict().items()})
        save(*args)

    trainer._save_checkpoint = saved
    message = stops(trainer)
    assert "gradient's norm is nan at step 1" in message and "The last checkpoint is checkpoint-1." in message
    names_only_row_five(message)
    assert after_first and all(torch.equal(v, after_first[k]) for k, v in draft.state_dict().items())


def test_a_row_that_breaks_in_its_trees_alone_is_named(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, num_groups=1)
    ids = torch.tensor([rows[5]["input_ids"]])
    roots = torch.tensor([[label != -100 for label in rows[5]["labels"]][1:] + [False]])
    # The roots of its group at the step that trains it, which evaluation's group, that of step 0, does not have.
    at = [
        sample_groups(roots, 1, 3, row_generators(row_seeds(trainer.args.seed, n, ids, ids > 0)))[0].flatten()
        for n in (0, 1)
    ]
    only_there = set(at[1].tolist()) - set(at[0].tolist())
    assert only_there
    forward = trainer.term.forward

    def broken(prefix, plan):
        values = forward(prefix, plan)
        bad = (prefix.sequences.input_ids == BAD).any(1)
        bad &= torch.isin(plan.roots, torch.tensor(sorted(only_there))).any(1)
        bad = bad[plan.valid.view(len(bad), -1).nonzero()[:, 0]]
        values = values.clone()
        values[bad] = values[bad] + (values[bad] - values[bad].detach()).abs().sqrt()  # zero, of infinite slope
        return values

    trainer.term.forward = broken
    message = stops(trainer)
    assert "gradient's norm is nan at step 1" in message
    names_only_row_five(message)


def test_a_checkpoint_that_is_not_complete_is_not_what_to_go_on_from(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path)
    draft.midlayer.register_forward_pre_hook(_Breaks(llama, "gradient"))
    unfinished = tmp_path / "checkpoint-7"  # of a run that was killed
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"x")
    assert "The last checkpoint is checkpoint-1." in stops(trainer)
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    assert last_checkpoint(trainer) == "No checkpoint is complete."


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_draft_that_overflows_is_named_with_the_row(llama, draft, rows, tmp_path, weight):
    trainer = make(draft, llama, rows, tmp_path, gto_weight=weight)
    draft.midlayer.register_forward_pre_hook(_Breaks(llama, "value"))
    message = stops(trainer)
    assert "the draft's logits" in message and "learning_rate" in message
    names_only_row_five(message)


def test_an_overflow_under_a_loss_scale_is_left_to_the_scaler(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path)
    trainer._samples = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.accelerator.scaler = scaler
    scaler.scale(torch.ones(()))
    for p in trainer.model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    trainer.accelerator.clip_grad_norm_ = lambda *args: torch.tensor(float("inf"))
    assert trainer._get_grad_norm(trainer.model) == float("inf")
    scaler.update(1.0)
    with pytest.raises(FloatingPointError, match="No single row"):
        trainer._get_grad_norm(trainer.model)
