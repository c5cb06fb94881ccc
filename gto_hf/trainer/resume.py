# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were not finished, and a reference that would not be the run's own, are noticed on resuming. Level 6."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers.trainer import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    OPTIMIZER_NAME_BIN,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from trl import SFTTrainer


GTO_STATE_NAME = "gto_state.json"


class ResumableTrainer(SFTTrainer):
    """
    `SFTTrainer` that resumes only from complete checkpoints of its own run.

    A checkpoint holds `gto_state.json` with the fingerprint of the reference draft, the tokens seen and the number of
    ranks. `trainer_state.json` is the last file of a checkpoint to be written.
    """

    # Fingerprint of the reference M0; None where there is none. Set by the subclass.
    reference_hash: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        As in [`~transformers.Trainer`].

        With `resume_from_checkpoint=True` unfinished checkpoints are skipped, with one warning that says what is wrong.

        Raises:
            ValueError: If no complete checkpoint is found, the named one is not complete, or `model` is not the draft
                that the checkpoint's run started from.
        """
        if resume_from_checkpoint:
            resume_from_checkpoint = self._complete_checkpoint(resume_from_checkpoint)
            saved = read_gto_state(Path(resume_from_checkpoint))
            check_reference(resume_from_checkpoint, saved, self.reference_hash)
            ranks = saved.get("world_size", self.args.world_size)
            if ranks != self.args.world_size:
                warnings.warn(
                    f"`{resume_from_checkpoint}` was saved by {ranks} processes and is resumed by {self.args.world_size}: "
                    "the rows to come are not those of an uninterrupted run."
                )
            self._total_train_tokens = saved.get("num_tokens", 0)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _complete_checkpoint(self, wanted: str | bool) -> str:
        """The checkpoint to resume from; all ranks agree on it."""
        automatic = str(wanted).lower() == "true"  # the command line gives a string
        folders = checkpoints(self.args.output_dir) if automatic else [Path(wanted)]
        if not folders:
            raise ValueError(f"There is no checkpoint in `output_dir={self.args.output_dir}` to resume from.")
        needed = self._needed_files()
        # Rows of (place in the list, what is wrong) of every rank: each one reads files of its own.
        found = gather_object([(i, problem(folder, needed, self.args.world_size)) for i, folder in enumerate(folders)])
        wrong = {i: what for i, what in found if what is not None}
        good = [i for i in range(len(folders)) if i not in wrong]
        skipped = "; ".join(f"{folders[i].name}: {wrong[i]}" for i in range(good[0] if good else len(folders)))
        if not good:
            raise ValueError(
                f"Nothing to resume from in `{self.args.output_dir if automatic else wanted}`: {skipped}. Name a complete "
                "checkpoint, or start again without `resume_from_checkpoint`."
            )
        if skipped:
            warnings.warn(f"Unfinished checkpoints are skipped ({skipped}). Resuming from {folders[good[0]].name}.")
        return str(folders[good[0]])

    def _needed_files(self) -> list[str]:
        """Files that this rank reads on resuming, beside weights and the trainer's state."""
        rank, args = self.args.process_index, self.args
        needed = ["rng_state.pth" if args.world_size <= 1 else f"rng_state_{rank}.pth"]
        if self.is_deepspeed_enabled:
            return [*needed, "latest"]
        if self.is_fsdp_enabled:
            return [*needed, SCHEDULER_NAME, f"{FSDP_MODEL_NAME}.bin", OPTIMIZER_NAME_BIN]
        scaler = [] if self.accelerator.scaler is None else [SCALER_NAME]
        return [*needed, OPTIMIZER_NAME, SCHEDULER_NAME, *scaler]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that is written again counts as unfinished until its last file is there."""
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            state = {
                "reference": self.reference_hash,
                "num_tokens": self._total_train_tokens,
                "world_size": self.args.world_size,
            }
            (folder / GTO_STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Wait for all ranks, so that the trainer's state, which is written next, says that all is there."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()


def checkpoints(output_dir: str) -> list[Path]:
    """Folders `checkpoint-N` in `output_dir`, newest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    numbers = sorted(int(n[len(prefix) :]) for n in names if n.startswith(prefix) and n[len(prefix) :].isdigit())
    return [Path(output_dir) / f"{prefix}{number}" for number in reversed(numbers)]


def read_gto_state(folder: Path) -> dict[str, Any]:
    """`gto_state.json` of a checkpoint; empty if it has none."""
    path = folder / GTO_STATE_NAME
    return json.loads(path.read_text()) if path.exists() else {}


def check_reference(checkpoint: str, saved: dict[str, Any], given: str | None) -> None:
    """
    Compare the reference draft of a checkpoint with the one made from `model`.

    Raises:
        ValueError: If they differ.
    Warns:
        If the checkpoint names none, although the run to come has one.
    """
    expected = saved.get("reference")
    if given is None or given == expected:
        return
    if expected is None:
        warnings.warn(
            f"`{checkpoint}` records no reference draft M0 (it was saved with `gto_weight=0`, or by another trainer). M0 is "
            "the draft given as `model`."
        )
        return
    raise ValueError(
        f"`model` is not the draft that the run of `{checkpoint}` started from: its reference M0 has the fingerprint "
        f"{expected[:12]}, the given draft {given[:12]}. Pass the draft that the run started from as `model`, and the "
        "checkpoint as `resume_from_checkpoint` alone."
    )


def problem(folder: Path, needed: list[str], ranks: int = 1) -> str | None:
    """
    What is wrong with a checkpoint; None if it is complete.

    Args:
        folder (`Path`): Checkpoint.
        needed (`list[str]`): Files that must be there.
        ranks (`int`, *optional*): Processes of this run. Of another number the random states are not needed.
    """
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / TRAINER_STATE_NAME).exists():
        return f"{TRAINER_STATE_NAME}, the last file to be written, is missing"
    return next(_problems(folder, needed, ranks), None)


def _problems(folder: Path, needed: list[str], ranks: int) -> Iterator[str]:
    """Missing files, then files that are cut."""
    saved_ranks = read_gto_state(folder).get("world_size", ranks) if _readable(folder / GTO_STATE_NAME) else ranks
    for name in needed:
        if not (folder / name).exists() and (saved_ranks == ranks or not name.startswith("rng_state")):
            yield f"{name} is missing" + ("" if name != OPTIMIZER_NAME else " (was `save_only_model` set?)")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    weights = [*folder.rglob(SAFE_WEIGHTS_NAME), *folder.rglob(ADAPTER_SAFE_WEIGHTS_NAME)]
    if index.exists() and _readable(index):
        weights = [folder / name for name in set(json.loads(index.read_text())["weight_map"].values())]
    if not weights and "latest" not in needed and not any(folder.rglob("*.distcp")):
        yield f"{SAFE_WEIGHTS_NAME} is missing"
    for path in [*weights, *sorted(folder.rglob("*"))]:
        if not path.exists():
            yield f"{path.name} is missing"
        elif not path.is_dir() and not _readable(path):
            yield f"{path.relative_to(folder)} is cut or unreadable"


def _readable(path: Path) -> bool:
    """Whether a file ends where its format says; true for formats that do not say."""
    if not path.exists() or path.suffix not in (".json", ".safetensors", ".pt", ".pth", ".bin"):
        return path.exists()
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        else:
            return zipfile.is_zipfile(path)
    except (ValueError, OSError, SafetensorError):
        return False
    return True
