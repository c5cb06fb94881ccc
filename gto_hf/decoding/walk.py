# SPDX-License-Identifier: Apache-2.0
"""
Token by token exactly what stock generation does, along a path of the tree. Level 4.

Losslessness rests on this file: every emitted token is chosen from the target's logits at its own exact prefix, by the
user's processors, with one draw of the generator, and every stopping criterion sees every prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from gto_hf.tree import DraftTree

from .processors import row_processors


class Emitter:
    """
    The growing sequences of one `generate` call.

    Attributes:
        lengths (`list[int]`): Known tokens of each row, prompt included.
        scores, logits (`list[list[torch.Tensor]]`, *optional*): Per row, `(1, V)` float32 per emitted token, if asked for.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        rows, prompt = input_ids.shape
        self.prompt_length, self.lengths, self._longest = prompt, [prompt] * rows, config.max_length
        pad = config._pad_token_tensor
        # Like stock generation: without an EOS, rows that stop early write on until all have stopped.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._fill = int(pad) if pad is not None else 0
        self._ids = input_ids.new_full((rows, max(prompt + 1, min(config.max_length, prompt + 512))), self._fill)
        self._ids[:, :prompt] = input_ids
        self._stops: list[int | None] = [None] * rows
        self._processors, self._criteria = row_processors(logits_processor, rows), stopping_criteria
        self._do_sample = bool(config.do_sample)
        wants = config.return_dict_in_generate
        self.scores: list[list[torch.Tensor]] | None = (
            [[] for _ in range(rows)] if wants and config.output_scores else None
        )
        self.logits: list[list[torch.Tensor]] | None = (
            [[] for _ in range(rows)] if wants and config.output_logits else None
        )

    @property
    def rows(self) -> int:
        """Sequences of the batch."""
        return len(self.lengths)

    @property
    def final_length(self) -> int | None:
        """Length of the output once every row has stopped; None before."""
        return None if None in self._stops else max(self._stops)

    def wants(self, row: int) -> bool:
        """Whether a row needs more tokens."""
        if self._stops[row] is None:
            return True
        if self._pads or self.rows == 1:
            return False
        return self.lengths[row] < (self._longest if self.final_length is None else self.final_length)

    @property
    def finished(self) -> bool:
        """Whether no row needs more tokens."""
        return not any(self.wants(row) for row in range(self.rows))

    def row(self, row: int) -> torch.Tensor:
        """`(1, L)`: everything known of a row. A view: do not write."""
        return self._ids[row : row + 1, : self.lengths[row]]

    def newest(self) -> torch.Tensor:
        """`(B,)`: the last known token of every row."""
        if self.rows == 1:
            return self._ids[:, self.lengths[0] - 1]
        index = torch.tensor(self.lengths, device=self._ids.device)[:, None] - 1
        return self._ids.gather(1, index)[:, 0]

    def choose(self, row: int, logits: torch.Tensor) -> torch.Tensor:
        """The next token `(1, 1)` of a row from the target's `logits` `(1, V)` at its current prefix."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        if self.logits is not None:
            self.logits[row].append(logits.clone())  # processors may write in place
        scores = self._processors[row](self.row(row), logits)
        if self.scores is not None:
            self.scores[row].append(scores)
        if self._do_sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1)
        return scores.argmax(-1, keepdim=True)

    def emit(self, row: int, logits: torch.Tensor) -> int:
        """Choose the next token of a row from `logits` `(1, V)`, append it, check the stops."""
        token, length = int(self.choose(row, logits)), self.lengths[row]
        if length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.full_like(self._ids, self._fill)], dim=1)
        self._ids[row, length] = token
        self.lengths[row] = length + 1
        seen = None if self.scores is None else tuple(self.scores[row])
        if self._stops[row] is None and bool(self._criteria(self.row(row), seen).all()):
            self._stops[row] = length + 1
        return token

    def sequences(self) -> torch.Tensor:
        """`(B, L)`: the result; rows that stopped before others are padded."""
        return self._ids[:, : self.final_length].clone()

    def columns(self, first: int, last: int) -> torch.Tensor:
        """`(B, last - first)`: emitted tokens of these columns."""
        return self._ids[:, first:last]

    def per_token(self, collected: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
        """
        Per-row scores or logits as stock generation returns them: one `(B, V)` per emitted token.

        Past the end of a row the padding token has probability one.
        """
        if collected is None:
            return None
        count = self.final_length - self.prompt_length
        padding = torch.full_like(collected[0][0], -torch.inf)
        padding[:, self._fill] = 0
        padded = [row[:count] + [padding] * (count - len(row)) for row in collected]
        return tuple(torch.cat(step) for step in zip(*padded, strict=True))


def walk(tree: DraftTree, logits: torch.Tensor, emitter: Emitter) -> tuple[list[list[int]], list[int]]:
    """
    Emit tokens from the root of a verified tree down for as long as they are drafted nodes, plus the one that is not.

    At each node the target's own next token is taken (argmax, or one sample after the processors); if it is a child,
    descend, else it is the bonus token. With a tree that does not depend on the target's randomness this draws from
    exactly the target's distribution (the `q = 1` rule of EAGLE-2, without the rejection loop).

    Args:
        tree ([`DraftTree`] of one row per sequence): Drafted nodes.
        logits (`torch.FloatTensor` of shape `(B, N + 1, V)`): The target's logits at root and nodes.
        emitter ([`Emitter`]): Appended to; at least one token for every row that wants one.

    Returns:
        `paths`: per row the columns whose keys, values and features stay valid, root first, one per emitted token (none
        for rows that are done); and how many of the row's emitted tokens were drafted ones.
    """
    table = torch.stack([tree.tokens, tree.parents]).tolist()
    paths, accepted = [], []
    for row, (tokens, parents) in enumerate(zip(*table, strict=True)):
        if not emitter.wants(row):
            paths.append([])
            accepted.append(0)
            continue
        child = {(parents[column], tokens[column]): column for column in range(1, len(tokens))}
        node, path = 0, [0]
        while True:
            token = emitter.emit(row, logits[row, node : node + 1])
            node = child.get((node, token), 0)
            if node == 0 or not emitter.wants(row):
                break
            path.append(node)
        paths.append(path)
        accepted.append(len(path) - 1 + (node != 0))
    return paths, accepted


def stream(streamer: Any, emitter: Emitter, start: int) -> int:
    """
    Hand a streamer the columns from `start` on that every row has written; returns where to go on.

    One sequence gives all its new tokens at once, `(k,)`; a batch gives column by column, `(B,)`, as stock does.
    """
    if streamer is None:
        return start
    waiting = [length for row, length in enumerate(emitter.lengths) if emitter.wants(row)]
    stop = min(waiting) if waiting else emitter.final_length
    if stop > start:
        columns = emitter.columns(start, stop).cpu()
        if emitter.rows == 1:
            streamer.put(columns[0])
        else:
            for column in columns.unbind(1):
                streamer.put(column)
    return max(start, stop)
