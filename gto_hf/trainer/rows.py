# SPDX-License-Identifier: Apache-2.0
"""
The data side of [`GTOTrainer`]: every dataset becomes `input_ids` and `labels` before TRL sees it. Level 6.

What cannot be trained on is skipped and counted, from map-style datasets before training and from streams as they are
read. TRL then cuts, shuffles and collates as for any dataset that comes tokenised.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, List, Value
from torch.utils.data import get_worker_info
from transformers import TrainerCallback
from trl.trainer.utils import global_then_local_main_first

from gto_hf.data.encode import IGNORED, NOTES, RowEncoder
from gto_hf.data.reasons import Note, RowError, Skip
from gto_hf.data.report import DataReport
from gto_hf.drafts import DraftModel

from .gto_config import GTOConfig


STREAM_HEAD = 512  # rows of a stream that are read before training
MEASURED_ROWS = 20_000
GROUP_COLUMNS = ("source", "language")
REPORT_FILE = "data_report.json"


class RowPreparation(TrainerCallback):
    """
    Prepares the datasets of one trainer and reports on them.

    Args:
        args ([`GTOConfig`]): Read at once, because TRL must not see all of it; see [`without_assistant_masks`].
        draft ([`DraftModel`]): Whose vocabulary the reports measure against.
    """

    def __init__(self, args: GTOConfig, draft: DraftModel) -> None:
        self.reports: dict[str, DataReport] = {}
        self._assistant_only = args.assistant_only_loss
        self._vocab_size = draft.config.vocab_size
        self._sayable = draft.t2d.cpu().numpy()
        self._tally: Tally | None = None

    @contextmanager
    def without_assistant_masks(self, args: GTOConfig) -> Iterator[None]:
        """Inside, TRL does not look for a chat template of its own to mask with: the rows come with their labels."""
        args.assistant_only_loss = False
        try:
            yield
        finally:
            args.assistant_only_loss = self._assistant_only

    def encoder(self, tokenizer: Any, args: GTOConfig, formatting_func: Callable | None = None) -> RowEncoder:
        """What makes tokens and labels of a row, with the options of `args`."""
        return RowEncoder(
            tokenizer,
            self._vocab_size,
            max_length=args.max_length,
            keep_end=args.truncation_mode == "keep_end",
            text_field=args.dataset_text_field,
            train_on=args.train_on,
            assistant_only=self._assistant_only,
            completion_only=args.completion_only_loss,
            formatting_func=formatting_func,
        )

    def prepare(self, dataset: Any, encoder: RowEncoder, name: str, num_proc: int | None = None) -> Any:
        """
        The dataset with `input_ids` and `labels` in every row, without the rows that cannot be trained on.

        Args:
            dataset (`Dataset` or `IterableDataset`): Rows in any format that [`RowEncoder`] reads.
            encoder ([`RowEncoder`]): See [`encoder`].
            name (`str`): `"train"`, or that of an evaluation set.
            num_proc (`int`, *optional*): Processes, for map-style datasets.

        Raises:
            ValueError: If no row is left, or most rows do not fit the target's tokenizer.
        Warns:
            If rows are skipped, reasoning is lost, or the draft's vocabulary covers too little.
        """
        report = DataReport(f"{name}_dataset")
        if isinstance(dataset, IterableDataset):
            prepared = self._prepare_stream(dataset, encoder, report, train=name == "train")
        else:
            prepared = self._prepare_rows(dataset, encoder, report, num_proc)
        self.reports[name] = report
        if PartialState().is_local_main_process:
            for message in report.warnings():
                warnings.warn(message)
        return prepared

    def _prepare_rows(
        self, dataset: Dataset, encoder: RowEncoder, report: DataReport, num_proc: int | None
    ) -> Dataset:
        with global_then_local_main_first():
            encoded = dataset.map(
                encoder,
                num_proc=num_proc,
                features=_with_encoded(dataset.features),
                desc=f"Reading {report.name}",
            )
        kept = []
        for batch in encoded.select_columns(["input_ids", NOTES]).with_format("arrow").iter(1000):
            lengths = pc.list_value_length(batch["input_ids"]).to_pylist()
            for length, notes in zip(lengths, batch[NOTES].to_pylist(), strict=True):
                if length:
                    kept.append(report.rows)
                report.count(length, notes)
        report.details = {reason: _detail(encoder, dataset[row]) for reason, row in report.first.items()}
        report.check()
        every = -(-len(kept) // MEASURED_ROWS)
        columns = ["input_ids", "labels", *(c for c in GROUP_COLUMNS if c in encoded.column_names)]
        for row in encoded.select_columns(columns).with_format(None).select(kept[::every]):
            self._measure(report, encoder, row, row)
        encoded = encoded.remove_columns(NOTES)
        return encoded.select(kept) if len(kept) < len(encoded) else encoded

    def _prepare_stream(
        self, dataset: IterableDataset, encoder: RowEncoder, report: DataReport, *, train: bool
    ) -> IterableDataset:
        report.sample = f"its first {STREAM_HEAD} rows at most"
        for number, row in enumerate(islice(dataset, STREAM_HEAD)):
            encoded = encoder(row)
            report.count(len(encoded["input_ids"]), encoded[NOTES])
            if encoded["input_ids"]:
                self._measure(report, encoder, encoded, row)
            elif report.first[encoded[NOTES][0]] == number:
                report.details[encoded[NOTES][0]] = _detail(encoder, row)
        report.check()
        tally = Tally()
        if train:
            self._tally = tally
        features = None if dataset.features is None else _with_encoded(dataset.features)
        return dataset.map(encoder, features=features).filter(tally).remove_columns(NOTES)

    def _measure(self, report: DataReport, encoder: RowEncoder, encoded: Mapping, row: Mapping[str, Any]) -> None:
        """Add an encoded row to the report; the trained text of the first one shows whether the mask is right."""
        report.measure(encoded["input_ids"], encoded["labels"], self._sayable, _groups(row))
        if not report.shown and encoder.tokenizer is not None:
            pairs = zip(encoded["input_ids"], encoded["labels"], strict=True)
            report.shown = encoder.tokenizer.decode([token for token, label in pairs if label != IGNORED])

    def announce(self, trainer: Any) -> int | None:
        """
        Print the report of the training set once, and write those of all sets to `data_report.json`.

        Returns:
            `int`, *optional*: Tokens of the longest row; None where it is not known (streams, unprepared rows).
        """
        args, dataset = trainer.args, trainer.train_dataset
        if "train" not in self.reports and _is_tokenised(dataset):
            # `skip_prepare_dataset`: the rows are used as they are, so they are looked at and nothing is changed.
            self.prepare(dataset, RowEncoder(None, self._vocab_size), "train")
        if self._tally is not None:
            self._tally.clear()  # rows that were looked at while the trainer was made
            trainer.add_callback(self)
        if args.should_log and "train" in self.reports:
            print(self.reports["train"])
        self._write(args)
        train = self.reports.get("train")
        return None if train is None or train.sample else train.longest

    def _write(self, args: GTOConfig) -> None:
        if not args.should_save:
            return
        content = {name: report.to_dict() for name, report in self.reports.items()}
        if self._tally is not None:
            content["train"]["read_in_training"] = self._tally.counts()
        path = Path(args.output_dir) / REPORT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def logs(self) -> dict[str, float]:
        """Rows of a stream read and skipped by this process so far; empty for map-style datasets."""
        if self._tally is None:
            return {}
        counts = self._tally.counts()
        return {"data/rows_read": counts["rows"], "data/rows_skipped": sum(counts["skipped"].values())}

    def on_train_end(self, args: GTOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which rows of a stream were skipped."""
        counts = self._tally.counts()
        if args.should_log and counts["skipped"]:
            warnings.warn(f"Of {counts['rows']} rows of the stream some were skipped: {counts['skipped']}")
        self._write(args)


class Tally:
    """
    Keeps the usable rows of a stream and counts them all, also when data loader workers read it.

    The counts are in shared memory, one line per worker.
    """

    NAMES = [*Skip, *Note]
    WORKERS = 64

    def __init__(self) -> None:
        self._counts = torch.zeros(self.WORKERS, 1 + len(self.NAMES), dtype=torch.long).share_memory_()

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Count one encoded row; whether it can be trained on."""
        worker = get_worker_info()
        line = self._counts[0 if worker is None else worker.id % self.WORKERS]
        line[0] += 1
        for note in row[NOTES]:
            line[1 + self.NAMES.index(note)] += 1
        return len(row["input_ids"]) > 0

    def clear(self) -> None:
        """Start anew."""
        self._counts.zero_()

    def counts(self) -> dict[str, Any]:
        """`rows`, and `skipped` and `notes` by name where there are any."""
        rows, *found = self._counts.sum(0).tolist()
        named = {name: n for name, n in zip(self.NAMES, found, strict=True) if n}
        return {
            "rows": rows,
            "skipped": {str(name): n for name, n in named.items() if isinstance(name, Skip)},
            "notes": {str(name): n for name, n in named.items() if isinstance(name, Note)},
        }


def _is_tokenised(dataset: Any) -> bool:
    """Whether a dataset has rows of ids that can be looked at without running a transform of the user's."""
    plain = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    return plain and "input_ids" in dataset.column_names


def _with_encoded(features: Features) -> Features:
    """A dataset's features with those of an encoded row; without them a first batch of skipped rows would have none."""
    ids = List(Value("int64"))
    return Features({**features, "input_ids": ids, "labels": ids, NOTES: List(Value("string"))})


def _groups(row: Mapping[str, Any]) -> list[str]:
    return [f"{name}={row[name]}" for name in GROUP_COLUMNS if row.get(name) is not None]


def _detail(encoder: RowEncoder, row: Mapping[str, Any]) -> str:
    """What exactly is wrong with a skipped row."""
    try:
        encoder.encode(row)
    except RowError as error:
        return error.detail
    raise RuntimeError("The row was skipped before, but can be read now; is `formatting_func` deterministic?")
