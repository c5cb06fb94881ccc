# SPDX-License-Identifier: Apache-2.0
"""
Token by token exactly what stock generation does, along a path of the tree. Level 4.

Losslessness rests on this file: every emitted token is chosen from the target's logits at its own exact prefix, by the
user's processors, with one draw of the generator, and every stopping criterion sees every prefix.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from gto_hf.tree import DraftTree


class Emitter:
    """
    The growing sequence of one `generate` call.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(1, L)`): Prompt and everything emitted.
        finished (`bool`): Whether a stopping criterion has fired.
        scores, logits (`list[torch.Tensor]`): `(1, V)` float32 per emitted token, if asked for.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        self.input_ids = input_ids
        self.finished = False
        self._processor, self._criteria = logits_processor, stopping_criteria
        self._do_sample = bool(config.do_sample)
        wants = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None

    def emit(self, logits: torch.Tensor) -> int:
        """Choose the next token from the target's `logits` `(1, V)` at the current prefix, append it, check stops."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        if self.logits is not None:
            self.logits.append(logits.clone())  # processors may write in place
        scores = self._processor(self.input_ids, logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self._do_sample:
            token = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        self.input_ids = torch.cat([self.input_ids, token], dim=-1)
        seen = None if self.scores is None else tuple(self.scores)
        self.finished = bool(self._criteria(self.input_ids, seen).all())
        return int(token)


def walk(tree: DraftTree, logits: torch.Tensor, emitter: Emitter) -> tuple[list[int], int]:
    """
    Emit tokens from the root of a verified tree down for as long as they are drafted nodes, plus the one that is not.

    At each node the target's own next token is taken (argmax, or one sample after the processors); if it is a child,
    descend, else it is the bonus token. With a tree that does not depend on the target's randomness this draws from
    exactly the target's distribution (the `q = 1` rule of EAGLE-2, without the rejection loop).

    Args:
        tree ([`DraftTree`] of one row): Drafted nodes.
        logits (`torch.FloatTensor` of shape `(N + 1, V)`): The target's logits at root and nodes.
        emitter ([`Emitter`]): Appended to; at least one token.

    Returns:
        `path`: columns whose keys, values and features stay valid, root first, one per emitted token; and how many of
        the emitted tokens were drafted ones.
    """
    tokens, parents = torch.stack([tree.tokens[0], tree.parents[0]]).tolist()
    child = {(parents[column], tokens[column]): column for column in range(1, len(tokens))}
    node, path = 0, [0]
    while True:
        token = emitter.emit(logits[node : node + 1])
        node = child.get((node, token), 0)
        if emitter.finished or node == 0:
            return path, len(path) - 1 + (node != 0)
        path.append(node)
