# SPDX-License-Identifier: Apache-2.0
"""Shape of a draft tree. The only home of these defaults; level 0, knows no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class TreeConfig:
    """
    How large a draft tree may grow. Decoding and training read the same three numbers.

    We count what is drafted: the root (the last known token) counts neither as a level nor as a node. EAGLE's
    `depth=7, total_token=60` is `TreeConfig(depth=8, top_k=10, total_tokens=59)` here.

    Args:
        depth (`int`, *optional*, defaults to `8`):
            Longest path in tokens after the root. Costs `depth - 1` draft forwards on top of the root's own.
        top_k (`int`, *optional*, defaults to `10`):
            Children of every expanded node and expanded nodes of every level. `1` gives a chain.
        total_tokens (`int`, *optional*, defaults to `60`):
            Drafted nodes that the target checks in one forward, root excluded.
        auto (`bool`, *optional*, defaults to `False`):
            Take the numbers as upper limits and choose depth and size anew in every round, by what pays on this machine
            (see [`Budget`]). Training takes the numbers as they are.

    Raises:
        ValueError: If a number is not a positive integer, or if `total_tokens` is more than the
            `top_k + (depth - 1) * top_k**2` nodes that the expansion scores.
    """

    depth: int = 8
    top_k: int = 10
    total_tokens: int = 60
    auto: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}={value!r}` must be a positive integer.")
        if self.total_tokens > self.capacity:
            raise ValueError(
                f"`total_tokens={self.total_tokens}` is more than a tree of `depth={self.depth}`, `top_k={self.top_k}` "
                f"can hold: {self.top_k} + {self.depth - 1} * {self.top_k}**2 = {self.capacity}. Lower "
                "`total_tokens`, or raise `depth` or `top_k`."
            )

    @property
    def capacity(self) -> int:
        """Number of nodes that the expansion scores before pruning."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    def limited(self, depth: int) -> TreeConfig:
        """The same tree cut at `depth >= 1` levels, for the last tokens before a length limit."""
        if depth >= self.depth:
            return self
        capacity = self.top_k + (depth - 1) * self.top_k**2
        return replace(self, depth=depth, total_tokens=min(self.total_tokens, capacity))

    def at_most(self, nodes: int) -> TreeConfig:
        """The same tree with no more than `nodes >= 1` nodes."""
        return self if nodes >= self.total_tokens else replace(self, total_tokens=nodes)

    def chain(self) -> TreeConfig:
        """One path of the same depth, for targets that check no trees."""
        return replace(self, top_k=1, total_tokens=self.depth)

    def to_dict(self) -> dict[str, int]:
        """Plain dictionary, as stored under `tree` in a draft's `config.json`."""
        fields = asdict(self)
        return fields if self.auto else {k: v for k, v in fields.items() if k != "auto"}
