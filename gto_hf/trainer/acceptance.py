# SPDX-License-Identifier: Apache-2.0
"""
Acceptance length during training: held-out prompts decoded with the draft as it is now, by the loop users decode with.

Teacher-forced accuracy is no acceptance length; this is. Level 6.
"""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import IterableDatasetShard as StreamShard

from gto_hf.decoding import DecodingStatistics, as_draft, record_rounds
from gto_hf.decoding.request import check_mode
from gto_hf.drafts import DraftModel
from gto_hf.evaluation import misalignment
from gto_hf.target import position_limit
from gto_hf.tree import TreeConfig

from .forward import bare_forward
from .gto_config import GTOConfig


_MISALIGNMENT = ("pruned", "greedy_accepted_path", "greedy_accepted", "tree_accepted")


def kept_rng() -> AbstractContextManager:
    """What is drawn inside from torch's global generators leaves them as they were: training goes on as if without it."""
    return torch.random.fork_rng(devices=range(torch.accelerator.device_count()))


def held_out_prompts(dataloader: Any, count: int, rank: int, world: int) -> list[tuple[int, list[int]]]:
    """
    This rank's share of `count` prompts of an evaluation set: the tokens of a row before its first supervised one.

    The rows are spread evenly over the set, the same ones every time; of a stream they are the first ones. A row that is
    supervised from its first token on (plain text) gives its first half; a row without supervision gives nothing.

    Args:
        dataloader (`DataLoader`): As the evaluation loop reads it; rows are collated one by one, so any format fits.
        count (`int`): Prompts over all ranks. rank, world (`int`): This process and how many there are.

    Returns:
        `list[tuple[int, list[int]]]`: Number of the prompt among all, and its ids.
    """
    dataset = dataloader.dataset
    numbers = range(rank, count, world)
    if isinstance(dataset, (IterableDatasetShard, StreamShard)):
        rows = islice(dataset.dataset, rank, count, world)
    elif isinstance(dataloader, DataLoaderDispatcher):  # every rank holds the whole stream, the first one reads it
        rows = islice(dataset, rank, count, world)
    elif not hasattr(dataset, "__len__"):  # the whole stream, or the shards of it that this rank reads
        rows = islice(dataset, len(numbers))
    else:
        count = min(count, len(dataset))
        numbers = range(rank, count, world)
        rows = (dataset[number * len(dataset) // count] for number in numbers)
    prompts = ((number, _prompt(dataloader.collate_fn([row]))) for number, row in zip(numbers, rows, strict=False))
    return [(number, prompt) for number, prompt in prompts if prompt]


def _prompt(batch: dict[str, torch.Tensor]) -> list[int]:
    """Ids before the first supervised token of a batch of one row; see [`held_out_prompts`]."""
    real = batch["attention_mask"][0].bool()
    ids, supervised = batch["input_ids"][0][real], batch["labels"][0][real] != -100
    if not bool(supervised.any()):
        return []
    first = int(supervised.int().argmax())
    return ids[: first or len(ids) // 2].tolist()


@dataclass
class _Counts:
    """What a rank decoded. Integers only, so that the sum over ranks is the same for any number of ranks."""

    depth: int
    tree: DecodingStatistics = field(default_factory=DecodingStatistics)
    chain: DecodingStatistics = field(default_factory=DecodingStatistics)
    aligned: list[int] = field(default_factory=lambda: [0] * len(_MISALIGNMENT))

    def add_rounds(self, rounds: list) -> None:
        """Count the misalignment of the rounds of one `generate` call."""
        found = misalignment(rounds)
        if found.rounds:
            totals = [round(getattr(found, name) * found.rounds) for name in _MISALIGNMENT]
            self.aligned = [a + b for a, b in zip(self.aligned, totals, strict=True)]

    def reduce(self, accelerator: Any) -> _Counts:
        """Sum over ranks; every rank must call it, and all know the same depth."""
        size = self.depth + 1
        flat = list(self.aligned)
        for part in (self.tree, self.chain):
            histogram = part.accepted_histogram + [0] * (size - len(part.accepted_histogram))
            flat += [part.runs, part.rounds, part.bonus_tokens, *histogram]
        flat = accelerator.reduce(torch.tensor(flat, device=accelerator.device), reduction="sum").tolist()
        first = len(_MISALIGNMENT)
        parts = []
        for start in (first, first + 3 + size):
            runs, rounds, bonus = flat[start : start + 3]
            histogram = flat[start + 3 : start + 3 + size]
            parts.append(
                DecodingStatistics(runs=runs, rounds=rounds, bonus_tokens=bonus, accepted_histogram=histogram)
            )
        return _Counts(self.depth, *parts, flat[:first])

    def metrics(self) -> dict[str, float]:
        """Names and values to log; NaN where no round was decoded."""
        rounds = self.tree.rounds
        reached = [sum(self.tree.accepted_histogram[k:]) for k in range(1, self.depth + 1)]
        shares = {f"accepted/depth_{k}": total for k, total in enumerate(reached, 1)}
        shares |= {f"misalignment/{name}": total for name, total in zip(_MISALIGNMENT, self.aligned, strict=True)}
        return {
            "tau": self.tree.tau,
            "tau_chain": self.chain.tau,
            "decoding_rounds": rounds,
            **{name: total / rounds if rounds else float("nan") for name, total in shares.items()},
        }


class Acceptance:
    """
    Decodes prompts of an evaluation set with the draft in training, and counts.

    Target and draft are used as they are, in their own dtypes and outside autocast: what is measured is the draft that
    `save_model` would write. An automatic tree is taken at its upper limits, so that the figures do not depend on the
    machine's speed.

    Args:
        args ([`GTOConfig`]): `eval_prompts`, `eval_max_new_tokens`, `eval_temperature` and `seed` are read.
        target (`PreTrainedModel`): The frozen target, where training has put it.
        draft ([`DraftModel`]): The draft to be trained.
        accelerator (`Accelerator`): Ranks and wrappers.

    Raises:
        ValueError: If `metric_for_best_model` asks for an acceptance length that cannot be measured.
    """

    def __init__(self, args: GTOConfig, target: nn.Module, draft: DraftModel, accelerator: Any) -> None:
        self._args, self._accelerator = args, accelerator
        self._target = accelerator.unwrap_model(target)
        self._chain_only = False
        self._problem = self._find_problem(draft)
        wanted = args.metric_for_best_model
        if self._problem and wanted and re.search(r"(^|[_/])tau(_chain)?$", wanted):
            raise ValueError(f"`metric_for_best_model={wanted!r}` cannot be measured: {self._problem}")
        self._warned: set[str] = set()

    def _find_problem(self, draft: DraftModel) -> str | None:
        """Why nothing can be decoded, or None."""
        if self._args.eval_prompts == 0:
            return "`eval_prompts=0` decodes nothing in evaluation."
        if is_deepspeed_zero3_enabled():
            return "the models are split (DeepSpeed ZeRO-3), so decoding would need every rank in every forward."
        config = copy.copy(self._target.generation_config)
        config.num_beams = 1
        try:
            self._chain_only = check_mode(self._target, draft, config).kind == "chain"
        except ValueError as error:
            return str(error)
        return None

    def measure(self, model: nn.Module, dataloader: Any) -> dict[str, float]:
        """
        Decode and count; every rank must call it. Random states, tree and modes are left as they were.

        Args:
            model (`nn.Module`): The draft in training, possibly inside a PEFT model or a wrapper.
            dataloader (`DataLoader`): Of the evaluation set.

        Returns:
            `dict[str, float]`: `tau` and `tau_chain` (tokens per target forward after the prefill, over all prompts),
            `accepted/depth_k` (share of rounds that accepted at least `k` drafted tokens), `misalignment/*` (see
            [`Misalignment`]) and `decoding_rounds`. Empty where nothing can be decoded.
        """
        if self._problem is not None:
            if self._args.eval_prompts:
                self._warn_once(f"Evaluation decodes no prompts and logs no tau: {self._problem}")
            return {}
        unwrapped = self._accelerator.unwrap_model(model)
        draft = as_draft(unwrapped)
        stored = draft.tree
        tree = replace(stored, auto=False)
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        prompts = held_out_prompts(dataloader, self._args.eval_prompts, rank, world)
        counts = _Counts(tree.depth)
        try:
            with kept_rng(), bare_forward(unwrapped):
                for number, prompt in prompts:
                    with record_rounds() as recorder:
                        counts.tree += self._decode(draft, tree, number, prompt)
                    counts.add_rounds(recorder.rounds)
                    if not self._chain_only:
                        counts.chain += self._decode(draft, tree.chain(), number, prompt)
        finally:
            draft.tree = stored
        if self._chain_only:
            counts.chain = counts.tree
        counts = counts.reduce(self._accelerator)
        if not counts.tree.runs:
            self._warn_once(
                "Evaluation decoded no prompts, so tau is NaN: no chosen row of the evaluation set has a token before its "
                "first supervised one with room for new tokens behind it."
            )
        return counts.metrics()

    def _decode(self, draft: DraftModel, tree: TreeConfig, number: int, prompt: list[int]) -> DecodingStatistics:
        """Counts of one `generate` call; none for a prompt without room or a request that the target's config forbids."""
        args, limit = self._args, position_limit(self._target)
        room = args.eval_max_new_tokens if limit is None else min(args.eval_max_new_tokens, limit - len(prompt))
        if room < 2:  # the first token belongs to the prefill, not to a round
            return DecodingStatistics()
        draft.tree = tree
        sampling = {"temperature": args.eval_temperature, "top_k": 0, "top_p": 1.0} if args.eval_temperature else {}
        ids = torch.tensor([prompt], device=self._target.device)
        torch.manual_seed(args.seed + number)
        try:
            # Not under inference mode: a tensor made there and kept by a model could not be trained through later.
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=draft,
                max_new_tokens=room,
                do_sample=bool(sampling),
                num_beams=1,
                return_dict_in_generate=True,
                **sampling,
            )
        except (ValueError, ImportError) as error:  # refusals come before any forward and must not end a training
            self._warn_once(f"Evaluation could not decode a prompt: {error}")
            return DecodingStatistics()
        return output.statistics

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            if self._accelerator.is_main_process:
                warnings.warn(message)
