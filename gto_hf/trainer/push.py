# SPDX-License-Identifier: Apache-2.0
"""What goes to the Hub: the card, and folders without paths of this machine. Level 6."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from gto_hf.decoding import as_draft
from gto_hf.hub import SUMMARY_FILE, clean_folder, copy_for_push, draft_card
from gto_hf.lora import hub_base, is_peft

from .resume import ResumableTrainer
from .summary import training_summary


logger = logging.get_logger(__name__)

_STAGE = "_push-"  # uploads leave out names that start with an underscore


class PushingTrainer(ResumableTrainer):
    """
    A trainer whose pushes hold no absolute path and no token, with a card of the draft.

    Pushes during training come from a copy, because they run in the background while the folder is written to and old
    checkpoints are deleted. `push_to_hub` makes `output_dir` itself publishable. Local checkpoints stay what they are.
    """

    _tag_names: list[str]
    _paper: dict[str, str]
    _publishing = False
    _dataset_name: str | None = None

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in [`~transformers.Trainer`]; also takes `dataset_name` and `license` for the card."""
        self._publishing = True
        try:
            return super().push_to_hub(*args, **kwargs)
        finally:
            self._publishing = False

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            self._write_summary(folder)
            if self._publishing:
                clean_folder(folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a copy of what is on disk now."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        jobs = [] if self.push_in_progress is None else list(self.push_in_progress.jobs)
        if not all(job.done() for job in jobs) and not self.args.hub_always_push:
            return
        output_dir = self.args.output_dir
        run, checkpoint = Path(output_dir), Path(checkpoint_folder)
        if not jobs:  # of a run that was killed
            for left in run.glob(f"{_STAGE}*"):
                shutil.rmtree(left, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=run))
        # The weights come from the checkpoint.
        patterns = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*", "*.safetensors", "*.bin")
        copy_for_push(run, stage / run.absolute().name, ignore=patterns)
        copy_for_push(checkpoint, stage / checkpoint.name)
        self.args.output_dir = str(stage / run.absolute().name)
        try:
            super()._push_from_checkpoint(str(stage / checkpoint.name))
        finally:
            self.args.output_dir = output_dir
        done = [] if self.push_in_progress is None else self.push_in_progress.jobs
        _when_done([job for job in done if job not in jobs], lambda: shutil.rmtree(stage, ignore_errors=True))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        license: str | None = None,
    ) -> None:
        """
        Write `training_summary.json` and, from it and the draft's config, `README.md`.

        Args:
            model_name (`str`, *optional*): Shown if the run has no Hub id; defaults to the folder's name.
            dataset_name (`str`, *optional*): Hub id of the training data.
            tags (`str` or `list[str]`, *optional*): More Hub tags.
            license (`str`, *optional*): Hub identifier of the draft's licence.
        """
        if not self.is_world_process_zero():
            return
        extra = [tags] if isinstance(tags, str) else list(tags or [])
        draft = as_draft(self.accelerator.unwrap_model(self.model))
        folder = Path(self.args.output_dir)
        self._dataset_name = dataset_name or self._dataset_name
        folder.mkdir(parents=True, exist_ok=True)
        summary = self._write_summary(folder)
        card = draft_card(
            draft.config,
            name=self.hub_model_id or model_name or folder.absolute().name,
            tags=[*self._tag_names, *extra],
            adapter=is_peft(self.model),
            license=license,
            training=summary,
        )
        card.save(folder / "README.md")

    def _write_summary(self, folder: Path) -> dict[str, Any]:
        """What a card can be written from later."""
        summary = training_summary(self, self._dataset_name) | {"paper": self._paper}
        (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary


def _when_done(jobs: list[Any], action: Callable[[], None]) -> None:
    """Run `action` after the last of some uploads, and say which ones failed: nothing else looks at their outcome."""
    left = len(jobs)
    if not left:
        action()

    def count(job: Any) -> None:
        nonlocal left
        left -= 1
        if job.exception() is not None:
            logger.warning(f"A push to the Hub failed, what is on disk is complete: {job.exception()}")
        if left == 0:
            action()

    for job in jobs:
        job.add_done_callback(count)


class AdapterPushCallback(TrainerCallback):
    """Warns before a run that pushes, and at a push, if the adapter's base draft is not on the Hub."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before any work, if the run will push."""
        if args.push_to_hub:
            self.on_push_begin(args, state, control, **kwargs)

    def on_push_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the base that `adapter_config.json` names."""
        if model is None or not is_peft(model) or hub_base(model) is not None:
            return
        warnings.warn(
            f"This adapter's base draft is `{model.active_peft_config.base_model_name_or_path}`, which nobody else can "
            "load, so the pushed adapter names no base and must be loaded with `base=`. Push the base draft first and train "
            "on `AutoDraft.from_pretrained(<its Hub id>)`, set `base_model_name_or_path` in `adapter_config.json` to it, or "
            "push the merged draft (`trainer.model.merge_and_unload().push_to_hub(...)`)."
        )
