# SPDX-License-Identifier: Apache-2.0
"""When a loss or a gradient is NaN or infinite: which model, which rows, which row of the dataset. Level 6."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.compute as pc
import torch
from accelerate.utils import gather_object
from datasets import Dataset

from gto_hf.drafts import DraftModel
from gto_hf.gto import SequencePrefix, TargetReading

from .resume import checkpoints, problem
from .sharded import whole


_SHOWN_IDS = 8
_SHOWN_ROWS = 4
_NAMES = ("id", "index", "source")  # columns that say where a row comes from


def nonfinite_loss(
    trainer: Any,
    reading: TargetReading,
    broken: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    what: str = "The loss is not finite",
) -> FloatingPointError:
    """
    The error for a loss that is NaN or infinite.

    Args:
        trainer ([`GTOTrainer`]): Whose loss it is.
        reading ([`TargetReading`]): The micro-batch and what the target said about it.
        broken (`torch.BoolTensor` of shape `(B,)`): Rows whose token loss is not finite.
        groups (`tuple`, *optional*): Which groups exist `(B * G,)`, and which of those have a finite loss `(groups,)`.
        what (`str`, *optional*): What failed.
    """
    cause, broken, advice = _blame(reading, broken, groups)
    sequences = reading.sequences
    rows = _describe(trainer, sequences.input_ids, sequences.valid, broken.nonzero()[:, 0].tolist())
    return FloatingPointError(
        f"{what} at step {trainer.state.global_step}: {cause}, in {_listed(rows, len(broken))}. The draft was not updated "
        f"with it. {_last_checkpoint(trainer)} {advice}"
    )


@contextmanager
def explain_nonfinite_trees(trainer: Any, draft: DraftModel, reading: TargetReading) -> Iterator[None]:
    """Within it, trees that cannot be grown because of NaN raise the error of [`nonfinite_loss`]."""
    try:
        yield
    except FloatingPointError as error:
        sequences = reading.sequences
        outputs = SequencePrefix(draft, sequences).outputs
        real = sequences.valid[:, -outputs.shape[1] :]
        what = "No tree can be grown, the draft's scores are not finite,"
        broken = (~torch.isfinite(draft.head(outputs)).all(-1) & real).any(1)
        raise nonfinite_loss(trainer, reading, broken, None, what=what) from error


def check_gradient(trainer: Any, grad_norm: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """
    Stop before the optimizer uses a gradient that is NaN or infinite although the loss was finite.

    An overflow under a loss scale above 1 is left to the scaler, which skips the step and lowers the scale.

    Args:
        trainer ([`GTOTrainer`]): Whose gradient it is.
        grad_norm (`float` or `torch.Tensor`): Over all parameters and ranks.
        batches (`list[dict]`): This rank's micro-batches of the step.

    Raises:
        FloatingPointError: Names the rows whose gradient alone is not finite, of all ranks.
    """
    if grad_norm is None or math.isfinite(float(grad_norm)):
        return
    accelerator = trainer.accelerator
    if accelerator.scaler is not None and accelerator.scaler.get_scale() > 1:
        return
    sharded = trainer.is_deepspeed_enabled
    if sharded and accelerator.mixed_precision == "fp16":
        return
    trainer.model.eval()  # no dropout, and no counting over ranks
    trainer.eval_groups_step = trainer.state.global_step  # but the groups whose gradient it was
    found = []
    for number, batch in enumerate([] if sharded else batches):
        inputs = trainer._prepare_inputs(batch)
        parts = inputs["input_ids"], inputs["attention_mask"].bool()
        rows = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(len(parts[0]))]
        with whole(trainer.model):
            broken = [i for i, row in enumerate(rows) if _breaks(trainer, row)]
        found += [f"micro-batch {number}, {text}" for text in _describe(trainer, *parts, broken)]
    found = gather_object(found)
    where = f"It comes from {_listed(found, None)}." if found else "No single row gives it: it arises in their sum."
    if sharded:
        where = "DeepSpeed has used it already."
    raise FloatingPointError(
        f"The gradient's norm is {float(grad_norm)} at step {trainer.state.global_step}, although the loss is finite. {where} "
        f"{'' if sharded else 'The draft was not updated with it. '}{_last_checkpoint(trainer)} Lower `learning_rate` or "
        "`gto_weight`, leave these rows out, or train in bfloat16 or float32 rather than float16."
    )


def _blame(
    reading: TargetReading, broken: torch.Tensor, groups: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[str, torch.Tensor, str]:
    """What is not finite first, in which rows `(B,)`, and what to do."""
    sequences, readout = reading.sequences, reading.readout
    dtype, valid = str(readout.states.dtype).removeprefix("torch."), sequences.valid
    target_advice = "Load the target in bfloat16 or float32" if dtype == "float16" else "Run the target alone on them"
    features = (~torch.isfinite(sequences.features).all(-1) & valid).any(1)
    if bool(features.any()):
        return (
            f"the target's features (in {dtype}) hold NaN or infinity",
            features,
            f"{target_advice}, or leave them out.",
        )
    known, states = valid[:, readout.first : readout.last], readout.states
    wrong = ((torch.isnan(states) | torch.isposinf(states)).any(-1) & known).any(1)
    if bool(wrong.any()):
        what = "logits" if readout.head is None else "last hidden states"
        return f"the target's {what} (in {dtype}) hold NaN or infinity", wrong, f"{target_advice}, or leave them out."
    advice = "Lower `learning_rate`, and train in bfloat16 or float32 rather than float16."
    if bool(broken.any()):
        return "the draft's logits hold NaN or infinity", broken, advice
    if groups is not None:
        exist, finite = groups
        row = exist.view(len(valid), -1).nonzero()[:, 0]
        broken = torch.zeros(len(valid), dtype=torch.bool, device=row.device).index_fill_(0, row[~finite], True)
        if bool(broken.any()):
            return "path probabilities or advantages of the groups are not finite", broken, advice
    return "no part of it alone is at fault", torch.ones(len(valid), dtype=torch.bool), advice


def _breaks(trainer: Any, row: dict[str, torch.Tensor]) -> bool:
    """Whether one row alone gives a gradient that is not finite."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    try:
        loss = trainer.compute_loss(trainer.model, row)
    except FloatingPointError:
        return True
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return any(grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads)


def _describe(trainer: Any, input_ids: torch.Tensor, valid: torch.Tensor, rows: list[int]) -> list[str]:
    """A text for each row: where it stands in the batch and in the dataset, and its first tokens."""
    process = "" if trainer.accelerator.num_processes == 1 else f" on process {trainer.accelerator.process_index}"
    texts = []
    for row in rows:
        ids = input_ids[row][valid[row]].tolist()
        place = _find(trainer.train_dataset, ids) if len(texts) < _SHOWN_ROWS else ""
        shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", .." if len(ids) > _SHOWN_IDS else "")
        texts.append(f"row {row} of the batch{process}{place}: {len(ids)} tokens [{shown}]")
    return texts


def _find(dataset: Any, ids: list[int]) -> str:
    """Where the dataset has these tokens; empty for streams and rows that are not there."""
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return ""
    start = 0
    for batch in dataset.select_columns(["input_ids"]).with_format("arrow").iter(1000):
        column = batch["input_ids"]
        same_length = pc.equal(pc.list_value_length(column), len(ids)).to_numpy(zero_copy_only=False).nonzero()[0]
        for place in same_length.tolist():
            if column[place].as_py() == ids:
                row = dataset[start + place]
                names = "".join(f", {name}={row[name]!r}" for name in _NAMES if name in row)
                return f" (row {start + place} of the prepared dataset{names})"
        start += len(column)
    return ""


def _listed(texts: list[str], total: int | None) -> str:
    """The first few texts."""
    more = len(texts) - _SHOWN_ROWS
    count = f"{len(texts)} rows" if total is None else f"{len(texts)} of {total} rows"
    return f"{count}: {'; '.join(texts[:_SHOWN_ROWS])}{f'; and {more} more' if more > 0 else ''}"


def _last_checkpoint(trainer: Any) -> str:
    """What to go on from: the newest checkpoint that `train(resume_from_checkpoint=True)` would take."""
    needed, ranks = trainer._needed_files(), trainer.args.world_size
    found = checkpoints(trainer.args.output_dir)
    complete = next((folder for folder in found if problem(folder, needed, ranks) is None), None)
    if complete is not None:
        return f"The last checkpoint is {complete.name}."
    return "No checkpoint is complete." if found else "No checkpoint was saved yet."
