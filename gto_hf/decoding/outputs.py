# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns with a draft: stock's output, its per-token states and attentions, and counts. Level 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gto_hf.target import layer_kinds, text_config

from .statistics import DecodingStatistics
from .trace import RoundTrace


@dataclass
class TreeDecodeOutput(GenerateDecoderOnlyOutput):
    """
    Stock `generate` output plus counts.

    Args:
        statistics ([`DecodingStatistics`]): Rounds, accepted lengths, drafted tokens, forwards.
        trace (`list[RoundTrace]`, *optional*): Every round, if recorded (see [`record_rounds`]).
    """

    statistics: DecodingStatistics | None = None
    trace: list[RoundTrace] | None = None


class TokenStates:
    """
    Hidden states or attentions of every emitted token, picked from forwards over trees.

    The first entry is the prompt's forward, as in stock generation; then one per token: that of the node before it.

    Args:
        prompt (`tuple[torch.Tensor]`): Per layer, of the prefill.
        rows (`int`): Sequences. batch_dim (`int`): Where they are: -3 in states, 0 in attentions.
    """

    def __init__(self, prompt: Any, rows: int, batch_dim: int) -> None:
        self._prompt, self._batch_dim = prompt, batch_dim
        self._rows: list[list[list[torch.Tensor]]] = [[] for _ in range(rows)]  # row, token, layer

    def add_states(self, states: tuple[torch.Tensor, ...], paths: list[list[int]]) -> None:
        """Take `(B, N + 1, H)` of every layer at the nodes of each row's path."""
        for row, path in enumerate(paths):
            for node in path:
                self._rows[row].append([layer.narrow(-3, row, 1).narrow(-2, node, 1) for layer in states])

    def add_attentions(
        self, target: Any, attentions: tuple[torch.Tensor, ...], paths: list[list[int]], lengths: list[int], past: int
    ) -> None:
        """
        Take `(B, heads, N + 1, columns)` of every layer at the nodes of each row's path, over that row's own columns.

        Args:
            lengths (`list[int]`): Columns of each row before the tree. past (`int`): Columns of the longest.
        """
        kinds = layer_kinds(target)
        types = getattr(text_config(target), "layer_types", None)
        for row, path in enumerate(paths):
            for step, node in enumerate(path):
                columns = [*range(lengths[row]), *(past + p for p in path[: step + 1])]
                picked = []
                for index, layer in enumerate(attentions):
                    kind = kinds[None if types is None else types[index]]
                    some = columns[-(kind.window or kind.chunk or len(columns)) :]
                    # Layers with a window hold the last columns only.
                    first = max(past + layer.shape[-2] - layer.shape[-1], 0)
                    where = torch.tensor([c - first for c in some if c >= first], device=layer.device)
                    picked.append(layer[row : row + 1, :, node : node + 1].index_select(-1, where))
                self._rows[row].append(picked)

    def result(self, tokens: int) -> tuple[Any, ...]:
        """One entry per emitted token, `tokens` in all; rows that stopped before hold zeros."""
        steps = [self._prompt]
        for step in range(tokens - 1):
            rows = [row[step] if step < len(row) else None for row in self._rows]
            like = next(row for row in rows if row is not None)
            layers = zip(*(row or [torch.zeros_like(x) for x in like] for row in rows), strict=True)
            steps.append(tuple(torch.cat(layer, dim=self._batch_dim) for layer in layers))
        return tuple(steps)
