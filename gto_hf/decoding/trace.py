# SPDX-License-Identifier: Apache-2.0
"""
What happened in every round, on request: `with record_rounds() as rounds: model.generate(...)`. Level 4.

A context, not an argument: `generate` refuses unknown arguments, and pipelines pass on only those they know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from gto_hf.tree import DraftTree


# Threads may share a draft: looking at its methods and replacing them is one act.
_REPLACING = threading.Lock()


@dataclass(frozen=True)
class RoundTrace:
    """
    One round of one sequence, on the CPU.

    Attributes:
        row (`int`): Row of the batch.
        length (`int`): Tokens known before the round; the root is the last of them.
        tree ([`DraftTree`] of one row): What the target checked; column 0 is the root.
        target_log_probs (`torch.FloatTensor` of shape `(N + 1,)`): The target's log-probability (nats, temperature 1,
            no processors) of each node's token after its parent; 0 for the root.
        path (`list[int]`): Columns that were accepted, root first.
        emitted (`list[int]`): Tokens the round emitted: the accepted ones and, unless a stop rule cut it, the bonus token.
        greedy (`list[int]`): The draft's own greedy path below the root, `depth` tokens, as it was before pruning.
        greedy_log_probs (`list[float]`): Draft log-probability of each of its tokens after the one before.
        greedy_kept (`int`): How many tokens of the greedy path are nodes of the tree.
    """

    row: int
    length: int
    tree: DraftTree
    target_log_probs: torch.Tensor
    path: list[int]
    emitted: list[int]
    greedy: list[int]
    greedy_log_probs: list[float]

    @property
    def greedy_kept(self) -> int:
        """How many tokens of the greedy path are nodes of the tree."""
        node, kept = 0, 0
        tokens, parents = self.tree.tokens[0].tolist(), self.tree.parents[0].tolist()
        child = {(parents[column], tokens[column]): column for column in range(1, len(tokens))}
        for token in self.greedy:
            node = child.get((node, token), 0)
            if node == 0:
                break
            kept += 1
        return kept


@dataclass
class RoundTimes:
    """
    Seconds of one round of a batch, by who spent them. What is left of `total` is host time.

    Attributes:
        target, draft, processors, total (`float`): Forward of the target; forwards and head of the draft; logits
            processors and the choice of each token; the whole round.
        nodes (`int`): Nodes checked per sequence. depth (`int`): Levels drafted. emitted (`int`): Tokens emitted.
    """

    target: float = 0.0
    draft: float = 0.0
    processors: float = 0.0
    total: float = 0.0
    nodes: int = 0
    depth: int = 0
    emitted: int = 0

    @property
    def host(self) -> float:
        """Seconds that belong to neither model nor to the processors."""
        return self.total - self.target - self.draft - self.processors


@dataclass
class Recorder:
    """
    Where rounds are recorded.

    Attributes:
        rounds (`list[RoundTrace]`): In order; empty without `trees`.
        times (`list[RoundTimes]`): In order; empty without `seconds`.
    """

    trees: bool = True
    seconds: bool = False
    rounds: list[RoundTrace] = field(default_factory=list)
    times: list[RoundTimes] = field(default_factory=list)


_recorder: ContextVar[Recorder | None] = ContextVar("gto_hf_recorder", default=None)


@contextmanager
def record_rounds(*, trees: bool = True, seconds: bool = False) -> Iterator[Recorder]:
    """
    Record every tree-decoding round of the `generate` calls made inside.

    Args:
        trees (`bool`, *optional*, defaults to `True`): Record trees, probabilities and paths. Costs a few draft forwards
            more per round (the greedy path); the text does not change. They are also in the output's `trace`.
        seconds (`bool`, *optional*, defaults to `False`): Record where the time goes. Waits for the device between steps.

    Yields:
        [`Recorder`]: Filled as rounds happen.
    """
    recorder = Recorder(trees=trees, seconds=seconds)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def active_recorder() -> Recorder | None:
    """The recorder of the innermost [`record_rounds`] around this call, if any."""
    return _recorder.get()


def trace_rounds(
    tree: DraftTree,
    logits: torch.Tensor,
    paths: list[list[int]],
    emitter: Any,
    known: list[int],
    greedy: DraftTree | None,
) -> list[RoundTrace]:
    """
    One [`RoundTrace`] per row that wrote something.

    Args:
        tree ([`DraftTree`] of `B` rows), logits (`(B, N + 1, V)`): What the target checked and what it said.
        paths (`list[list[int]]`): Accepted columns per row. known (`list[int]`): Tokens of each row before the round.
        emitter ([`Emitter`]): After the round. greedy ([`DraftTree`], *optional*): The draft's greedy paths, as chains.
    """
    log_probs = logits.float().log_softmax(-1)
    rows = torch.arange(len(paths), device=logits.device)[:, None]
    parents, tokens = tree.parents.to(logits.device), tree.tokens.to(logits.device)
    target = log_probs[rows, parents, tokens].cpu()
    target[:, 0] = 0
    tree = tree.to("cpu")
    traces = []
    for row, path in enumerate(paths):
        if not path:
            continue
        chain = None if greedy is None else greedy.scores[row].cpu()
        traces.append(
            RoundTrace(
                row=row,
                length=known[row],
                tree=tree.rows([row]),
                target_log_probs=target[row],
                path=path,
                emitted=emitter.row(row)[0, known[row] :].tolist(),
                greedy=[] if greedy is None else greedy.tokens[row, 1:].tolist(),
                greedy_log_probs=[] if chain is None else chain.diff().tolist(),
            )
        )
    return traces


class Stopwatch:
    """Seconds per part of a round, on a device that may work behind the host's back. Does nothing unless `on`."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.current = RoundTimes()

    def now(self) -> float:
        """Seconds on the clock once the accelerator, if any, has finished what it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `target`, `draft`, `processors` or `total`."""
        if not self.on:
            yield
            return
        start = self.now()
        try:
            yield
        finally:
            setattr(self.current, name, getattr(self.current, name) + self.now() - start)

    @contextmanager
    def methods(self, **parts: list[tuple[Any, str]]) -> Iterator[None]:
        """Within it, time spent in these methods of these objects is added to the part they stand for."""
        if not self.on:
            yield
            return
        replaced = []
        with _REPLACING:
            for part, methods in parts.items():
                for owner, name in methods:
                    if hasattr(getattr(owner, name), "_timed_by"):
                        continue  # another call, in another thread, is taking the time of this draft
                    replaced.append((owner, name, owner.__dict__.get(name)))
                    owner.__dict__[name] = self._timed(part, getattr(owner, name))
        try:
            yield
        finally:
            with _REPLACING:
                for owner, name, before in replaced:
                    if before is None:
                        del owner.__dict__[name]
                    else:
                        owner.__dict__[name] = before

    def _timed(self, part: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return method(*args, **kwargs)

        timed._timed_by = self
        return timed
