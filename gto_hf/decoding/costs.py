# SPDX-License-Identifier: Apache-2.0
"""Measuring, once, what a round of decoding costs here: the [`CostCurve`] of an automatic tree. Level 4."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gto_hf.drafts import DraftModel
from gto_hf.tree import Budget, CostCurve, DraftTree, TreeConfig

from .cache import room_in
from .drafter import Drafter
from .trace import Stopwatch
from .verifier import Verifier


_SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_REPEATS = 3

# target -> draft -> (device, dtype, rows, context range, ..) -> curve. Forgotten with the models.
_curves: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple, CostCurve]]] = WeakKeyDictionary()


def context_range(length: int) -> int:
    """Which of the ranges (powers of two, from 256 on) a text of so many tokens is in: costs are measured once in each."""
    return max(length - 1, 255).bit_length()


def budget_for(
    target: Any,
    draft: DraftModel,
    verifier: Verifier,
    drafter: Drafter,
    tree: TreeConfig,
    roots: torch.Tensor,
    limit: int | None,
) -> Budget:
    """
    The budget of one `generate` call: on `draft.costs` if that is set, else on a measured and remembered curve.

    Measuring happens on the call's own cache, after its prefill, once per target, draft, device, dtype, batch size, tree
    limits and context range (powers of two); it takes about forty target forwards. Nothing past position `limit` is run.
    """
    trust = drafter.trust(tree.top_k)
    if draft.costs is not None:
        return Budget(draft.costs, tree, trust)
    length = max(verifier.lengths)
    room = room_in(verifier.cache, length)
    if limit is not None:  # positions end there
        room = min(limit - length, tree.total_tokens + 1 if room is None else room)
    measured = tree if room is None or room > tree.total_tokens else tree.at_most(max(room - 1, 1))
    if room is not None and room < 3:  # a single node at most: not worth measuring
        return Budget(CostCurve((0, 1), (1.0, 1.0), 0.0, 0.0), tree)
    key = (str(target.device), target.dtype, len(verifier.lengths), context_range(length), measured)
    curves = _curves.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
    if key not in curves:
        curves[key] = measure_costs(verifier, drafter, measured, roots)
    return Budget(curves[key], tree, trust)


def measure_costs(verifier: Verifier, drafter: Drafter, tree: TreeConfig, roots: torch.Tensor) -> CostCurve:
    """
    Time target forwards over bare roots and ever larger trees, and drafting at two depths.

    Args:
        verifier, drafter: After the prefill; both are left as they were.
        tree ([`TreeConfig`]): Upper limits. roots (`torch.LongTensor` of shape `(B,)`): Newest tokens.
    """
    watch = Stopwatch(True)
    sizes = sorted({0, tree.total_tokens, *(n for n in _SIZES if n < tree.total_tokens)})

    def check(nodes: int) -> None:
        verifier.verify(DraftTree.root_only(roots).padded(nodes + 1))
        verifier.commit([[] for _ in verifier.lengths])
        verifier.outputs = None

    def draft(depth: int) -> None:
        drafter.grow(roots, TreeConfig(depth=depth, top_k=tree.top_k, total_tokens=min(tree.top_k, tree.total_tokens)))

    check(sizes[-1])
    draft(1)  # reads the prompt; first calls pay for allocations
    forwards = drafter.forwards
    target = [0.0] * len(sizes)
    seconds = _interleaved(watch, [lambda n=n: check(n) for n in sizes])
    for index in range(len(sizes)):  # a larger forward is never cheaper: what says so is noise
        target[index] = max(seconds[index], target[index - 1] if index else 0.0)
    deep = min(3, tree.depth)
    first, last = _interleaved(watch, [lambda: draft(1), lambda: draft(deep)])
    level = max((last - first) / max(deep - 1, 1), 0.0)
    drafter.forwards = forwards
    # Reading accepted tokens is one more forward of the draft, about as dear as a level.
    return CostCurve(tuple(sizes), tuple(target), first + level, level)


def _interleaved(watch: Stopwatch, actions: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each action, taken in turns so that a busy moment hits all of them."""
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(_REPEATS):
        for spent, action in zip(seconds, actions, strict=True):
            start = watch.now()
            action()
            spent.append(watch.now() - start)
    return [statistics.median(spent) for spent in seconds]
