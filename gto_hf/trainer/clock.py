# SPDX-License-Identifier: Apache-2.0
"""Real optimizer steps of a [`GTOTrainer`], one at a time, with a clock on their parts. Level 6."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from .gto_trainer import GTOTrainer


# Parts of a step: the target over the rows; trees; the target over tree nodes; the reference's view of accepted paths; the
# draft's forward with gradient and its losses; backward and optimizer. None holds another.
PARTS = ("target", "trees", "scoring", "paths", "draft", "backward")


class Clock:
    """
    Seconds by name of what is done. On an accelerator it waits for queued work before it reads the time.

    Args:
        device (`torch.device`): Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        """Seconds of a monotonic clock, all work so far done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what happens within to `name`."""
        start = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start

    def timed(self, name: str, call: Callable) -> Callable:
        """`call`, every one of whose calls is added to `name`."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return inner

    def pop(self) -> dict[str, float]:
        """What was added since the last time."""
        found, self.seconds = self.seconds, {}
        return found


@dataclass
class Step:
    """
    One optimizer step.

    Attributes:
        seconds (`float`): Of the whole step. parts (`dict[str, float]`): Seconds by [`PARTS`].
        trained_tokens (`int`): Roots of the token loss. tree_roots (`int`): Roots of trees.
        target_nodes (`int`): Tree tokens forwarded through the target.
    """

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    tree_roots: int = 0
    target_nodes: int = 0

    @property
    def other(self) -> float:
        """Seconds in none of the parts."""
        return self.seconds - sum(self.parts.values())


class Stepper:
    """
    Drives a trainer step by step, as its own loop does: `training_step`, clipping, optimizer, scheduler.

    Args:
        trainer ([`GTOTrainer`]): On one process, without accumulation. It is not to be trained otherwise.
        clock ([`Clock`]): Gets the seconds of the parts.
    """

    def __init__(self, trainer: GTOTrainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock
        self.model, _ = trainer._prepare_for_training(trainer.args.max_steps, None, None)
        trainer._reader.read = clock.timed("target", trainer._reader.read)
        trainer._forward_redirection = clock.timed("draft", trainer._forward_redirection)
        trainer.accelerator.backward = clock.timed("backward", trainer.accelerator.backward)
        self.plan: Any = None  # the last one, and what it was made from
        self.planned: dict[str, Any] = {}
        if trainer.term is not None:
            trainer.term.phase = clock.phase
            trainer.term.plan = self._kept(trainer.term.plan)

    def _kept(self, plan: Callable) -> Callable:
        @wraps(plan)
        def inner(unwrapped: Any, draft: Any, reading: Any, groups: Any, valid: Any, seeds: Any) -> Any:
            self.planned = {"unwrapped": unwrapped, "draft": draft, "groups": groups, "valid": valid}
            self.plan = plan(unwrapped, draft, reading, groups, valid, seeds)
            return self.plan

        return inner

    def batch(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """Rows of token ids, all of them supervised, as a batch on the device."""
        batch = self.trainer.data_collator([{"input_ids": row, "labels": list(row)} for row in rows])
        return self.trainer._prepare_inputs(batch)

    def look(self, rows: list[list[int]]) -> Any:
        """The plan that [`step`] would make of these rows now, None if they have no group; nothing is trained."""
        self.model.train()
        self.plan = None
        trainer = self.trainer
        trainer.get_batch_samples(iter([self.batch(rows)]), 1, trainer.args.device)
        with torch.no_grad():
            trainer.compute_loss(self.model, self.batch(rows))
        self.clock.pop()
        return self.plan

    def step(self, rows: list[list[int]]) -> Step:
        """One optimizer step on these rows."""
        trainer, clock = self.trainer, self.clock
        clock.pop()
        self.plan = None
        batch = self.batch(rows)
        start = clock.now()
        (inputs,), items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        trainer.training_step(self.model, inputs, items)
        with clock.phase("backward"):
            norm = trainer._clip_grad_norm(self.model)
            trainer._get_grad_norm(self.model, norm)
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            self.model.zero_grad()
        seconds = clock.now() - start
        trainer.state.global_step += 1
        found, plan = clock.pop(), self.plan
        step = Step(seconds, {name: found.get(name, 0.0) for name in PARTS}, int(items))
        if plan is not None:
            step.tree_roots = int(plan.valid.sum()) * self.planned["groups"].shape[-1]
            step.target_nodes = plan.target_nodes
        return step
