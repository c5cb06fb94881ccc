# SPDX-License-Identifier: Apache-2.0
"""
How large a tree pays on this machine. Level 0: sees log-probabilities and seconds, no models.

A drafted node costs target time and may save a round. With `r` tokens per second as the worth of a second, a tree of
`n` nodes drafted `d` levels deep is worth `E - r * (T(n) + D(d))`, where `E` is the expected number of accepted drafted
tokens: the sum of the nodes' path probabilities, corrected by how often the target has accepted at each depth so far.
The tree grows while the next level is expected to add worth; then the `n` of most worth is kept.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

from .config import TreeConfig
from .tree import DraftTree


@dataclass(frozen=True)
class CostCurve:
    """
    What a round costs on one machine, in seconds.

    Attributes:
        nodes (`tuple[int, ...]`): Numbers of drafted nodes that were measured, ascending, the first one 0 (a bare root).
        target (`tuple[float, ...]`): Seconds of a target forward over root and that many nodes.
        draft (`float`): Seconds of drafting the first level, reading the last round's tokens included.
        level (`float`): Seconds of each further level.

    Raises:
        ValueError: If the numbers do not describe a curve.
    """

    nodes: tuple[int, ...]
    target: tuple[float, ...]
    draft: float
    level: float

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.target) or len(self.nodes) < 2 or self.nodes[0] != 0:
            raise ValueError("A cost curve needs seconds for at least two numbers of nodes, the first one 0.")
        if list(self.nodes) != sorted(set(self.nodes)) or not all(
            0 <= seconds < float("inf") for seconds in (*self.target, self.draft, self.level)
        ):
            raise ValueError("A cost curve needs ascending numbers of nodes and seconds that are not negative.")

    def target_seconds(self, nodes: int) -> float:
        """Seconds of a target forward over root and `nodes`, interpolated, or extended in the last segment's slope."""
        right = min(max(bisect.bisect_left(self.nodes, nodes), 1), len(self.nodes) - 1)
        x0, x1 = self.nodes[right - 1], self.nodes[right]
        y0, y1 = self.target[right - 1], self.target[right]
        return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)

    def draft_seconds(self, depth: int) -> float:
        """Seconds of drafting `depth` levels."""
        return 0.0 if depth < 1 else self.draft + self.level * (depth - 1)


class Budget:
    """
    Chooses depth and size of every round's tree, and whether to draft at all; the [`Growth`] of an automatic tree.

    Holds the calibration of one `generate` call. Two calls with equal inputs and costs grow equal trees.

    Attributes:
        plain_rounds (`int`): Rounds without a tree because none was worth its time.

    Args:
        costs ([`CostCurve`]): Of this target, draft and machine.
        config ([`TreeConfig`]): Upper limits.
        trust (`float`, *optional*, defaults to `1.0`): How often the draft is right at first, as a share of how often it says
            so; read off the prompt (see `Drafter.trust`).
    """

    # How fast old rounds are forgotten; weight of a calibration's prior, in expected tokens; levels beyond the deepest one
    # that was ever accepted; tokens that a draft as good as it says may lose before the first pause; first and longest pause.
    _KEEP, _WEIGHT, _LEVELS, _CREDIT, _PAUSE, _LONGEST = 0.95, 1.5, 3, 2.0, 8, 64

    def __init__(self, costs: CostCurve, config: TreeConfig, trust: float = 1.0) -> None:
        self.costs, self.config = costs, config
        self.plain_rounds = 0
        self.plain_rate = 1 / max(costs.target_seconds(0), 1e-9)
        sizes = range(config.total_tokens + 1)
        self._seconds = torch.tensor([costs.target_seconds(n) for n in sizes], dtype=torch.float64)
        self._expected = [self._WEIGHT] * (config.depth + 1)
        self._accepted = [self._WEIGHT * trust] * (config.depth + 1)
        self._tokens, self._time = 1.0, 1 / self.plain_rate
        self._gain, self._pause, self._wait = self._CREDIT * trust, self._PAUSE, 0
        self._depth, self._deepest = 0, 0
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None  # first level of the round, (R, k) each

    @property
    def rate(self) -> float:
        """Tokens per second that a second is worth: what recent rounds made, and no less than plain decoding."""
        return max(self.plain_rate, self._tokens / self._time)

    def start_round(self) -> bool:
        """Whether to draft in this round. After rounds that did not pay it pauses, then tries again."""
        self._depth, self._first = 0, None
        if self._wait > 0:
            self._wait -= 1
            return False
        return True

    # ------------------------------------------------------------------ growth
    def deeper(self, levels: list[torch.Tensor]) -> bool:
        """See [`Growth`]. The next level is expected to look like the last one, thinned as much as the last one was."""
        self._depth = len(levels)
        if self._depth >= self._deepest + self._LEVELS:
            return False
        width = min(self.config.top_k, levels[-1].shape[1])
        best = levels[-1].topk(width, dim=1).values
        mass = best.exp().sum(1)
        before = 1.0 if len(levels) == 1 else levels[-2].topk(width, dim=1).values.exp().sum(1)
        ratio = (mass / before).clamp(max=1).log()
        now, then = self._worth(levels), self._worth([*levels, best + ratio[:, None]])
        gain = (then.max() - now.max()).item()
        return gain > self.rate * self.costs.level

    def nodes(self, levels: list[torch.Tensor], tokens: list[torch.Tensor]) -> int:
        """See [`Growth`]: the number of nodes of most worth."""
        self._depth, self._first = len(levels), (levels[0], tokens[0])
        return int(self._worth(levels).argmax())

    def _worth(self, levels: list[torch.Tensor]) -> torch.Tensor:
        """`(total + 1,)`: expected accepted tokens less the worth of the target's time, for every number of nodes."""
        scores = torch.cat(levels, dim=1).double().cpu()
        factors = [self._accepted[d] / self._expected[d] for d in range(1, len(levels) + 1)]
        factor = torch.cat([torch.full((level.shape[1],), f) for level, f in zip(levels, factors, strict=True)])
        most = min(self.config.total_tokens, scores.shape[1])
        best, index = scores.topk(most, dim=1)
        expected = (best.exp() * factor[index]).cumsum(1).mean(0)
        worth = torch.cat([expected.new_zeros(1), expected])
        return worth - self.rate * self._seconds[: most + 1]

    # ------------------------------------------------------------------ learning
    def observe(self, tree: DraftTree, paths: list[list[int]], emitted: list[int]) -> None:
        """
        Learn from a finished round.

        Args:
            tree ([`DraftTree`]): What was checked. paths (`list[list[int]]`): Accepted columns per row, root first.
            emitted (`list[int]`): First token that each row emitted.
        """
        active = [path for path in paths if path]
        if not active:
            return
        count, nodes = sum(len(path) for path in active) / len(active), tree.tokens.shape[1] - 1
        seconds = self.costs.target_seconds(nodes) + self.costs.draft_seconds(self._depth)
        self._tokens = self._KEEP * self._tokens + count
        self._time = self._KEEP * self._time + seconds
        self.plain_rounds += nodes == 0
        if self._depth == 0:
            return
        self._pay(count - seconds * self.plain_rate)
        if nodes == 0:  # what the draft would have said is known, and so is what the target wrote
            if self._first is not None:
                said = self._first[1] == torch.tensor(emitted, device=self._first[1].device)[:, None]
                right = said.any(1).tolist()
                for row, mass in enumerate(self._first[0].exp().sum(1).tolist()):
                    if paths[row]:
                        self._learn(1, mass, right[row])
            return
        masses = torch.zeros(len(tree.depths), self.config.depth + 1)
        masses.scatter_add_(1, tree.depths.cpu(), tree.scores.float().exp().cpu())
        for path, mass in zip(paths, masses.tolist(), strict=True):
            self._deepest = max(self._deepest, len(path) - 1)
            for depth in range(1, self.config.depth + 1 if path else 0):
                if mass[depth] == 0:
                    break
                self._learn(depth, mass[depth], len(path) > depth)

    def _learn(self, depth: int, mass: float, accepted: bool) -> None:
        """Add one level that was expected to be accepted with probability `mass`."""
        self._expected[depth] = self._KEEP * self._expected[depth] + min(mass, 1.0)
        self._accepted[depth] = self._KEEP * self._accepted[depth] + accepted

    def _pay(self, gain: float) -> None:
        """Book what a round gained over plain decoding, in tokens; a lasting loss makes a pause, each longer."""
        self._gain = min(self._KEEP * self._gain + gain, 4.0)
        if self._gain < 0:
            self._wait, self._pause = self._pause, min(2 * self._pause, self._LONGEST)
            self._gain = 0.0
        elif gain > 0:
            self._pause = self._PAUSE
