# SPDX-License-Identifier: Apache-2.0
"""
`gto-hf bench train`: what a training step costs, Phase I and Phase II side by side, and against the naive loop. Level 6.

Every round takes the same rows through one optimizer step of every mode, in rotating order, so that a busy moment of the
machine hits all of them. Ratios are paired: of the same round. To tell the parts of a step apart, an accelerator is waited
for between them, which a training run does not do; a step here is therefore no faster than there.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm

from gto_hf.drafts import DraftModel
from gto_hf.evaluation.bench import peak_memory
from gto_hf.gto import read_target
from gto_hf.target import text_config

from .clock import PARTS, Clock, Step, Stepper
from .gto_config import GTOConfig
from .gto_trainer import GTOTrainer
from .naive import naive_rewards


PHASE_I, PHASE_II = "Phase I", "Phase II"


@dataclass(frozen=True)
class Mode:
    """
    One way of training.

    Attributes:
        name (`str`): As in the table. options (`dict`): Of [`GTOConfig`].
        naive_trees (`int`): Trees per root that are forwarded one by one without any sharing.
        grown_trees (`int`): Trees per root that are grown in a step.
        seen_before (`bool`): Its rows were trained on once before the clock starts.
    """

    name: str
    options: dict[str, Any]
    naive_trees: int
    grown_trees: int
    seen_before: bool = False


MODES = (
    Mode(PHASE_I, {"gto_weight": 0.0}, 0, 0),
    Mode(PHASE_II, {"gto_weight": 0.5}, 2, 2),
    Mode("Phase II, M0's trees kept", {"gto_weight": 0.5, "group_positions": "grid"}, 2, 1, seen_before=True),
    Mode("Phase II, tree_kl", {"gto_weight": 0.5, "gto_objective": "tree_kl"}, 1, 1),
)


@dataclass
class Range:
    """Median of repeated measurements, with the smallest and the largest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """Of at least one value."""
        found = list(values)
        return cls(median(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass
class ModeResult:
    """
    Steps of one mode on rows of one length.

    Attributes:
        mode (`Mode`): Which. length (`int`): Tokens per row. rows (`int`): Per step. nodes (`int`): Per tree.
        steps (`list[Step]`): Timed ones, in order of the rounds.
        peak_memory (`int`): Peak of a step above what is there before it (models, optimizer), in bytes; 0 if not measured.
    """

    mode: Mode
    length: int
    rows: int
    nodes: int
    steps: list[Step] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return median(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Roots of the token loss per second, median."""
        return median(step.trained_tokens / step.seconds for step in self.steps)

    @property
    def trees_per_second(self) -> float:
        """Trees grown, scored and learnt from per second of the whole step, median."""
        return median(self.mode.grown_trees * step.tree_roots / step.seconds for step in self.steps)

    @property
    def target_tokens(self) -> float:
        """Tokens forwarded through the target per row: the row itself and tree nodes; mean."""
        return self.length + sum(step.target_nodes for step in self.steps) / len(self.steps) / self.rows

    @property
    def naive_target_tokens(self) -> float:
        """The same with every node of every tree on its own: `2 K m g` nodes for draft and reference; mean."""
        roots = sum(step.tree_roots for step in self.steps) / len(self.steps) / self.rows
        return self.length + self.mode.naive_trees * roots * self.nodes

    def shares(self) -> dict[str, float]:
        """Part of the steps' time, by [`PARTS`] and `"other"`; they add up to 1."""
        total = sum(step.seconds for step in self.steps)
        parts = {name: sum(step.parts[name] for step in self.steps) / total for name in PARTS}
        return {**parts, "other": sum(step.other for step in self.steps) / total}

    def over(self, base: ModeResult) -> Range:
        """Time of a step over that of another mode, round by round."""
        return Range.of(a.seconds / b.seconds for a, b in zip(self.steps, base.steps, strict=True))


@dataclass(frozen=True)
class NaiveRound:
    """
    The naive loop on some roots of one row.

    Attributes:
        roots, step_roots (`int`): Roots timed, and roots of the whole step.
        seconds (`dict[str, float]`): `rows` (both drafts over the row), `trees`, `scoring`.
        difference (`float`): Largest difference between its rewards and those of the fast way.
        target_tokens (`int`): Tokens forwarded through the target, the row left out.
    """

    roots: int
    step_roots: int
    seconds: dict[str, float]
    difference: float
    target_tokens: int


@dataclass
class NaiveResult:
    """
    The naive loop on rows of one length: `length` tokens per row, `rows` per step; only the first row of a step is timed.
    """

    length: int
    rows: int
    rounds: list[NaiveRound] = field(default_factory=list)

    @property
    def roots_per_second(self) -> float:
        """Roots per second, what is paid once per row left out; median. Each has two trees."""
        return median(r.roots / (r.seconds["trees"] + r.seconds["scoring"]) for r in self.rounds)

    @property
    def difference(self) -> float:
        """Largest difference between two rewards of any round."""
        return max(r.difference for r in self.rounds)

    def whole(self) -> list[float]:
        """Seconds for the trees of a whole step, by round: linear in the number of roots."""
        return [
            self.rows * r.seconds["rows"] + (r.seconds["trees"] + r.seconds["scoring"]) * r.step_roots / r.roots
            for r in self.rounds
        ]

    def factors(self, fast: ModeResult) -> tuple[Range, Range]:
        """How much longer than `fast` it takes, by round: for trees and their scores, and for a whole step with it."""
        pairs = [
            (slow, step.parts["trees"] + step.parts["scoring"], step.seconds)
            for slow, step in zip(self.whole(), fast.steps, strict=True)
        ]
        return (
            Range.of(slow / own for slow, own, _ in pairs),
            Range.of((whole - own + slow) / whole for slow, own, whole in pairs),
        )


def make_steppers(
    draft: DraftModel,
    reference: DraftModel | None,
    target: nn.Module,
    tokenizer: Any,
    rows: list[list[int]],
    folder: str,
    options: dict[str, Any],
) -> dict[str, Stepper]:
    """
    A trainer for every one of [`MODES`], each with a copy of the draft.

    Args:
        draft ([`DraftModel`]): What is trained. reference ([`DraftModel`], *optional*): M0; defaults to `draft`.
        rows (`list[list[int]]`): Token ids; the longest row sets `max_length`.
        folder (`str`): For what trainers write. options (`dict`): Of [`GTOConfig`], for all modes.
    """
    dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    made = {}
    for number, mode in enumerate(MODES):
        args = GTOConfig(
            f"{folder}/{number}",
            max_steps=1,
            lr_scheduler_type="constant",
            max_length=max(map(len, rows)),
            save_strategy="no",
            report_to="none",
            report=False,
            eval_prompts=0,
            disable_tqdm=True,
            **{**options, **mode.options},
        )
        start = copy.deepcopy(draft if reference is None else reference)
        with redirect_stdout(io.StringIO()) if made else nullcontext():  # one report of the same rows is enough
            trainer = GTOTrainer(start, target, args, train_dataset=dataset, processing_class=tokenizer)
        if reference is not None:
            trainer.model.load_state_dict(draft.state_dict())
        made[mode.name] = Stepper(trainer, Clock(trainer.args.device))
    return made


def bench_train(
    steppers: dict[str, Stepper],
    rows: list[list[int]],
    length: int,
    *,
    rows_per_step: int = 1,
    steps: int = 3,
    warmup: int = 1,
    reference_roots: int = 8,
    memory: bool = True,
) -> tuple[list[ModeResult], NaiveResult]:
    """
    Time steps of all modes, and the naive loop, on rows of one length.

    Args:
        steppers (`dict[str, Stepper]`): See [`make_steppers`].
        rows (`list[list[int]]`): `rows_per_step * steps` rows of at least `length` tokens; they are cut.
        length (`int`): Tokens per row. rows_per_step, steps, warmup (`int`): Warm-up rounds are not counted.
        reference_roots (`int`): Roots per round of the naive loop, evenly spread.
        memory (`bool`, *optional*, defaults to `True`): Measure the peak of one more step, apart from the timing.
    """
    batches = [[row[:length] for row in rows[i * rows_per_step : (i + 1) * rows_per_step]] for i in range(steps)]
    nodes = next(iter(steppers.values())).trainer.tree.total_tokens
    results = {mode.name: ModeResult(mode, length, rows_per_step, nodes) for mode in MODES}
    naive = NaiveResult(length, rows_per_step)
    for mode in MODES:
        for batch in batches if mode.seen_before else []:
            steppers[mode.name].step(batch)
    for number in tqdm(range(warmup + steps), desc=f"bench {length}"):
        batch = batches[(number - warmup) % steps]
        counted = number >= warmup
        slow = time_naive(steppers[PHASE_II], batch, reference_roots)
        if counted:
            naive.rounds.append(slow)
        turn = number % len(MODES)
        for mode in [*MODES[turn:], *MODES[:turn]]:
            made = steppers[mode.name].step(batch)
            if counted:
                results[mode.name].steps.append(made)
    if memory:
        for name, stepper in steppers.items():
            results[name].peak_memory = peak_memory(lambda s=stepper: s.step(batches[0]), stepper.clock.device)
    return list(results.values()), naive


def time_naive(stepper: Stepper, batch: list[list[int]], count: int) -> NaiveRound:
    """
    One round of the naive loop on the first row of a batch, with the draft as it is, compared with the fast way.

    Args:
        stepper ([`Stepper`]): Of the paper's objective. count (`int`): Roots, at most those there are.

    Raises:
        ValueError: If the first row has no group.
    """
    plan = stepper.look(batch)
    if plan is None or not bool(stepper.planned["valid"][0].any()):
        raise ValueError(
            f"A row of {len(batch[0])} tokens has no {stepper.trainer.args.group_size} adjacent positions between "
            "end-of-sequence tokens. Give longer texts, or lower `--group-size`."
        )
    trainer, clock, seen = stepper.trainer, stepper.clock, stepper.planned
    args, target = trainer.args, trainer.target_model
    roots = seen["groups"][0][seen["valid"][0]].flatten()
    some = torch.linspace(0, len(roots) - 1, min(count, len(roots)), device=roots.device).round().long()
    inputs = stepper.batch(batch[:1])
    reading = read_target(
        target, inputs["input_ids"], inputs["attention_mask"], trainer._reader.layers, 1, 2, use_cache=True
    )
    clock.pop()
    with trainer.accelerator.autocast():
        made = naive_rewards(
            seen["draft"],
            trainer.reference.draft(seen["draft"]),
            reading.sequences,
            roots[some],
            trainer.tree,
            target,
            reading.cache,
            trainer._eos_ids,
            aggregation=args.gto_aggregation,
            eta=args.gto_eta,
            temperature=args.target_temperature,
            as_reference=lambda: trainer.reference.context(seen["unwrapped"]),
            phase=clock.phase,
        )
    # The plan's groups are those that exist, row after row: the first ones are the first row's.
    pairs = ((made.rewards, plan.rewards), (made.reference_rewards, plan.reference_rewards))
    differences = [float((own - fast.flatten()[some]).abs().max()) for own, fast in pairs]
    return NaiveRound(
        roots=len(some),
        step_roots=int(plan.valid.sum()) * seen["groups"].shape[-1],
        seconds=clock.pop(),
        difference=max(differences),
        target_tokens=made.target_tokens,
    )


def sample_rows(
    target: nn.Module, count: int, length: int, ending: torch.Tensor, seed: int, *, batch: int = 8
) -> list[list[int]]:
    """
    Rows that the target writes itself at temperature 1, each of exactly `length` tokens, from nothing but its first token.

    Args:
        count (`int`): Rows. ending (`torch.LongTensor` of shape `(E,)`): End-of-sequence ids; they are never written.
        seed (`int`): Of the sampling. batch (`int`): Rows written at a time.
    """
    torch.manual_seed(seed)
    config = text_config(target)
    first = config.bos_token_id
    rows: list[list[int]] = []
    while len(rows) < count:
        size = min(batch, count - len(rows))
        start = torch.randint(config.vocab_size, (size, 1)) if first is None else torch.full((size, 1), first)
        written = target.generate(
            start.to(target.device),
            attention_mask=torch.ones_like(start).to(target.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length - 1,
            suppress_tokens=ending.tolist() or None,
            pad_token_id=0,
        )
        rows += written.tolist()
    return rows
