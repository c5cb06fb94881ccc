# SPDX-License-Identifier: Apache-2.0
"""
What a trainer asks of its frozen models, and what it keeps of the answers on disk. Level 6.

Rows are found by their tokens, so shuffling, resuming and other ranks change nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from gto_hf.drafts import DraftModel
from gto_hf.gto import FeatureStore, ReferenceMemory, RowStore, TargetReading, read_target, row_spans
from gto_hf.target import fingerprint, weights_hash
from gto_hf.tree import TreeConfig

from .gto_config import GTOConfig


logger = logging.get_logger(__name__)


class TargetReader:
    """
    Forwards of the target; with `features_path`, the rows that were read before come from disk.

    Args:
        target (`PreTrainedModel`): The frozen target.
        draft ([`DraftModel`]): Says which features it reads.
        args ([`GTOConfig`]): `features_path`.
        datasets (`list`): Tokenised rows of training and evaluation (`Dataset` or `IterableDataset`), for the estimate of the
            size.
        split (`bool`): The target is split over ranks, which must call its modules equally often.
    """

    def __init__(
        self, target: nn.Module, draft: DraftModel, args: GTOConfig, datasets: list[Any], *, split: bool
    ) -> None:
        self.target, self.layers, self.split = target, list(draft.config.feature_layers), split
        if split and args.features_path is not None:
            raise ValueError(
                f"`features_path={args.features_path}` does not work under ZeRO-3, where all ranks run the target together. Unset "
                "it, or use ZeRO-2."
            )
        self.features: FeatureStore | None = None
        if args.features_path is not None:
            counts = [_tokens(dataset) for dataset in datasets]
            tokens = None if None in counts else sum(counts)
            self._announce(args.features_path, tokens, FeatureStore.bytes_per_token(self.layers, target))
            facts = {"target": _of_target(target), "feature layers": self.layers, "dtype": str(target.dtype)}
            self.features = FeatureStore(RowStore(args.features_path, facts))

    @staticmethod
    def _announce(folder: str, tokens: int | None, per_token: int) -> None:
        """Say how large the folder may grow; refuse what the disk cannot hold."""
        if tokens is None:
            logger.warning(
                f"Features go to `{folder}`: {per_token:,} bytes per token; the length of a stream is not known."
            )
            return
        there = Path(folder)
        kept = sum(shard.stat().st_size for shard in there.glob("*.safetensors")) if there.exists() else 0
        size, existing = tokens * per_token, there
        while not existing.exists():
            existing = existing.absolute().parent
        free = shutil.disk_usage(existing).free
        logger.warning(
            f"Features go to `{folder}`: {tokens:,} tokens of {per_token:,} bytes, {size / 1e9:.2f} GB in all, of which "
            f"{kept / 1e9:.2f} GB are there."
        )
        if size - kept > free:
            raise ValueError(
                f"`features_path={folder}` would grow by {(size - kept) / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free. "
                "Name another folder, or leave it unset: features are then computed in every step."
            )

    def read(
        self, inputs: dict[str, Any], roots: torch.Tensor, real: torch.Tensor, *, use_cache: bool
    ) -> TargetReading:
        """What the target says about a batch, with logits from the first root to the last."""
        first = int(roots[real].min()) if bool(real.any()) else 1
        last = int(roots[real].max()) + 1 if bool(real.any()) else 2
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        spans = row_spans(roots, real)
        if self.features is not None and not use_cache:
            found = self.features.read(ids, mask, first, last, spans)
            if found is not None:
                return found
        reading = read_target(self.target, ids, mask, self.layers, first, last, use_cache=use_cache, whole=self.split)
        return reading if self.features is None or use_cache else self.features.keep(reading, spans)


def reference_memory(
    args: GTOConfig, reference_hash: str | None, target: nn.Module, tree: TreeConfig, eos_ids: torch.Tensor
) -> ReferenceMemory | None:
    """Where M0's trees are kept, for groups on a fixed grid; None where they would not come again."""
    if args.group_positions != "grid" or args.gto_path != "greedy":
        return None
    folder = args.reference_path or str(Path(args.output_dir) / "_reference-trees")  # pushes leave out what starts so
    facts = {
        "reference draft": reference_hash,
        "target": _of_target(target),
        "tree": tree.to_dict(),
        "groups": [args.num_groups, args.group_size],
        "target temperature": args.target_temperature,
        "end tokens": eos_ids.tolist(),
        "precision": [args.bf16, args.fp16, str(target.dtype)],
    }
    return ReferenceMemory(RowStore(folder, facts))


class FlushStores(TrainerCallback):
    """Writes what row stores hold in memory whenever a checkpoint is written, and at the end."""

    def __init__(self, *stores: RowStore) -> None:
        self.stores = stores

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        for store in self.stores:
            store.flush()

    on_train_end = on_epoch_end = on_save


def _tokens(dataset: Any) -> int | None:
    """Tokens of a dataset of rows; None for streams."""
    if not isinstance(dataset, Dataset):
        return None
    batches = dataset.select_columns("input_ids").with_format("arrow").iter(1000)
    return sum(pc.sum(pc.list_value_length(batch["input_ids"])).as_py() or 0 for batch in batches)


def _of_target(target: nn.Module) -> dict[str, Any]:
    active = getattr(target, "active_adapters", None)
    adapters = [str(name) for name in active] if isinstance(active, (list, tuple)) else []
    return {**fingerprint(target), "weights": weights_hash(target), "adapters": adapters}
