# SPDX-License-Identifier: Apache-2.0
"""
The decoding loop: draft a tree, check it in one target forward, keep what the target would have written. Level 4.

One target forward per round for the whole batch. Rows accept what they accept: the cache keeps each row's tokens in the
columns of that row's own text (see `cache.py`), so every row is decoded as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from gto_hf.drafts import DraftModel
from gto_hf.target import Route, position_limit, tree_attention
from gto_hf.tree import Budget, DraftTree, TreeConfig

from .cache import room_in
from .costs import budget_for
from .drafter import Drafter, evaluating
from .outputs import TokenStates, TreeDecodeOutput
from .request import prepare_request
from .statistics import DecodingStatistics
from .trace import RoundTimes, Stopwatch, active_recorder, trace_rounds
from .verifier import Verifier
from .walk import Emitter, stream, walk


@torch.no_grad()
def tree_decode(
    target: Any,
    input_ids: torch.Tensor,
    *,
    draft: DraftModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    **model_kwargs: Any,
) -> TreeDecodeOutput | torch.LongTensor:
    """
    Generate with draft trees; called by `generate` in place of its own loops, with the same arguments.

    Args:
        target (`PreTrainedModel`): The unmodified model `generate` was called on.
        input_ids (`torch.LongTensor` of shape `(B, L)`): Prompts; `(B, 0)` if they are `inputs_embeds`.
        draft ([`DraftModel`]): Its `tree` says how large a tree to draft.
        streamer (`BaseStreamer`, *optional*): Gets the tokens of every round at once; `end()` is called once.

    Returns:
        What stock `generate` returns: ids `(B, L + new)`, or a [`TreeDecodeOutput`].

    Raises:
        ValueError: See [`prepare_request`]; before any forward.
    """
    route, restore = prepare_request(target, draft, input_ids, generation_config, model_kwargs, logits_processor)
    draft.attach(target)
    emitter = Emitter(input_ids, logits_processor, stopping_criteria, generation_config)
    decoding = _Decoding(target, draft, route, emitter, generation_config, model_kwargs, restore)
    attention = tree_attention(target) if route.kind == "tree" else nullcontext()
    try:
        with evaluating(draft):
            decoding.prefill(input_ids)
        streamed = stream(streamer, emitter, input_ids.shape[1])
        with target._optimize_model_for_decode(), attention, evaluating(draft), decoding.watched():
            while not emitter.finished:
                decoding.round()
                streamed = stream(streamer, emitter, streamed)
            if streamer is not None:
                streamer.end()
            return decoding.result()
    finally:
        decoding.verifier.release()


class _Decoding:
    """One `generate` call: the two models, the growing sequences, and what is recorded on the way."""

    def __init__(
        self,
        target: Any,
        draft: DraftModel,
        route: Route,
        emitter: Emitter,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        restore: Callable[[], None],
    ) -> None:
        self.target, self.draft, self.emitter, self.config = target, draft, emitter, config
        self.tree = draft.tree if route.kind == "tree" else draft.tree.chain()
        self.wants_states = bool(config.return_dict_in_generate and config.output_hidden_states)
        self.wants_attentions = bool(config.return_dict_in_generate and config.output_attentions)
        self.verifier = Verifier(
            target,
            list(draft.config.feature_layers) if draft.reads_features else [],
            model_kwargs,
            config,
            chain=route.kind == "chain",
            size=self.tree.total_tokens + 1,
            limit=position_limit(target),
            restore=restore,
            all_states=self.wants_states,
        )
        self.drafter = Drafter(draft)
        limits = [limit for limit in (position_limit(target), draft.position_limit()) if limit is not None]
        self.limit = min(limits, default=None)
        self.statistics = DecodingStatistics()
        self.recorder = active_recorder()
        self.watch = Stopwatch(self.recorder is not None and self.recorder.seconds)
        self.trace: list | None = [] if self.recorder is not None and self.recorder.trees else None
        self.budget: Budget | None = None
        self.states: TokenStates | None = None
        self.attentions: TokenStates | None = None
        self._embeds = model_kwargs.get("inputs_embeds")

    def watched(self) -> AbstractContextManager:
        """Within it the seconds of both models and of choosing tokens are taken, if a recorder asks for them."""
        return self.watch.methods(
            target=[(self.verifier, "forward")],
            draft=[(self.draft, name) for name in ("forward", "fuse", "head")],
            processors=[(self.emitter, "choose")],
        )

    # ------------------------------------------------------------------ prefill
    def prefill(self, input_ids: torch.Tensor) -> None:
        """Forward the prompts, emit every row's first token, let the draft read."""
        emitter, verifier = self.emitter, self.verifier
        logits, features = verifier.prefill(input_ids)
        if self.wants_states:
            self.states = TokenStates(verifier.outputs.hidden_states, emitter.rows, -3)
        if self.wants_attentions:
            self.attentions = TokenStates(verifier.outputs.attentions, emitter.rows, 0)
        verifier.outputs = None
        for row in range(emitter.rows):
            emitter.emit(row, logits[row : row + 1])
        self.statistics.start(emitter.rows)
        # Columns of the cache minus columns of the sequences: embedding prompts have no ids.
        self.offset = verifier.prompt_columns - emitter.prompt_length
        if not emitter.finished:
            self._read_prompt(features)
        if self.tree.auto and not emitter.finished and self._limited() is not None:
            roots = emitter.newest().to(self.target.device)
            self.budget = budget_for(self.target, self.draft, verifier, self.drafter, self.tree, roots, self.limit)

    def _read_prompt(self, features: torch.Tensor | None) -> None:
        """Pairs of the prompt: the feature of a column with the token of the next."""
        verifier, emitter = self.verifier, self.emitter
        ids = torch.stack([emitter.row(row)[0] for row in range(emitter.rows)])
        if not self.draft.reads_features:
            count = ids.shape[1]
            valid = verifier.valid_columns(count - 1) if self.offset == 0 else None
            if valid is not None:
                valid = torch.cat([valid, torch.ones_like(valid[:, :1])], dim=1)
            self.drafter.read(None, ids, self._positions(range(-1, count - 1)) + self.offset, valid)
            return
        count, total = features.shape[1], verifier.prompt_columns
        embeddings = None
        if self.offset > 0 and self._embeds is not None and ids.shape[1] == 1:
            prompt = self.draft.prompt_embeddings(self._embeds)
            if prompt is None:  # the draft has an embedding of its own: it starts with the first written token
                features, count = features[:, -1:], 1
            else:
                embeddings = torch.cat([prompt[:, 1:], self.draft.embed(ids).to(prompt)], dim=1)[:, -count:]
                ids = ids.new_zeros(len(ids), count)
        columns = range(total - count, total)
        self.drafter.read(
            features, ids[:, -count:], self._positions(columns), verifier.valid_columns(count), embeddings
        )

    def _positions(self, columns: range) -> torch.Tensor:
        """`(B, F)`: pair positions of columns of the cache, counted from each row's first token."""
        padding = self.verifier.padding
        return torch.arange(columns.start, columns.stop, device=padding.device) - padding

    # ------------------------------------------------------------------ rounds
    def round(self) -> None:
        """Draft, verify, walk, keep."""
        emitter, verifier, watch = self.emitter, self.verifier, self.watch
        watch.current = RoundTimes()
        before, known = list(verifier.lengths), list(emitter.lengths)
        with watch.part("total"):
            tree = self._grow()
            verifier.done = [not emitter.wants(row) for row in range(emitter.rows)]
            logits, features = verifier.verify(tree)
            try:
                paths, accepted = walk(tree, logits, emitter)
            except BaseException:  # the user's code: leave no drafted token in the user's cache
                verifier.commit([[] for _ in verifier.lengths])
                raise
            self._keep_states(paths, before)
            verifier.commit(self._kept(paths))
            self._read_paths(features, paths, known, before)
        self._count(tree, logits, paths, accepted, known)
        verifier.outputs = None

    def _kept(self, paths: list[list[int]]) -> list[list[int]]:
        """What the cache keeps: the paths, and the last token of rows that ended in an earlier round, as stock does."""
        rows = zip(paths, self.verifier.lengths, self.emitter.lengths, strict=True)
        last = self.config.max_length  # the very last column of a text is never cached
        return [path or ([0] if cached < known + self.offset and known < last else []) for path, cached, known in rows]

    def _grow(self) -> DraftTree:
        roots = self.emitter.newest().to(self.verifier.target.device)
        config, self._greedy = self._limited(), None
        if config is None or (self.budget is not None and not self.budget.start_round()):
            return DraftTree.root_only(roots)
        tree = self.drafter.grow(roots, config, self.budget)
        if self.trace is not None:
            self._greedy = self.drafter.greedy_paths(roots, config.depth)
        return tree

    def _limited(self) -> TreeConfig | None:
        """The tree that fits before the length limit, the target's positions and the cache; None for a bare root."""
        emitter, verifier = self.emitter, self.verifier
        active = [row for row in range(emitter.rows) if emitter.wants(row)]
        room = self.config.max_length - min(emitter.lengths[row] for row in active) - 1
        if self.limit is not None:
            room = min(room, self.limit - max(verifier.lengths) - 1)
        space = room_in(verifier.cache, max(verifier.lengths))
        nodes = self.tree.total_tokens if space is None else min(self.tree.total_tokens, space - 1)
        if room < 1 or nodes < 1:
            return None
        return self.tree.limited(room).at_most(nodes)

    def _keep_states(self, paths: list[list[int]], lengths: list[int]) -> None:
        outputs = self.verifier.outputs
        if self.states is not None:
            self.states.add_states(outputs.hidden_states, paths)
        if self.attentions is not None:
            self.attentions.add_attentions(self.target, outputs.attentions, paths, lengths, max(lengths))

    def _read_paths(
        self, features: torch.Tensor | None, paths: list[list[int]], known: list[int], before: list[int]
    ) -> None:
        """Pairs of the accepted tokens: the true feature of each node of a path with the token emitted after it."""
        emitter, verifier = self.emitter, self.verifier
        if emitter.finished:
            return
        if emitter.rows == 1:
            path = paths[0]
            tokens = emitter.columns(known[0], emitter.lengths[0])
            positions = self._positions(range(before[0], before[0] + len(path)))
            self.drafter.read(None if features is None else features[:, path], tokens, positions)
            return
        most = max(len(path) for path in paths)
        device = verifier.target.device
        step = torch.arange(most, device=device)
        counts, starts, columns = (
            torch.tensor(values, device=device)[:, None] for values in ([len(p) for p in paths], before, known)
        )
        valid = step < counts
        tokens = emitter.columns(0, max(emitter.lengths)).gather(
            1, (columns + step).clamp(max=max(emitter.lengths) - 1).to(emitter.newest().device)
        )
        if features is not None:
            table = torch.tensor([path + [0] * (most - len(path)) for path in paths], device=features.device)
            features = features.gather(1, table[..., None].expand(-1, -1, features.shape[-1]))
        self.drafter.read(features, tokens, starts + step - verifier.padding, valid)

    def _count(
        self, tree: DraftTree, logits: torch.Tensor, paths: list[list[int]], accepted: list[int], known: list[int]
    ) -> None:
        """Statistics, the budget's calibration, and what a recorder asked for."""
        nodes = tree.tokens.shape[1] - 1
        self.statistics.add_rounds([(n, len(p) > n) for n, p in zip(accepted, paths, strict=True) if p], nodes)
        if self.budget is not None:
            first = [int(self.emitter.row(row)[0, known[row]]) if path else -1 for row, path in enumerate(paths)]
            self.budget.observe(tree, paths, first)
        if self.watch.on:
            times = self.watch.current
            times.nodes, times.depth, times.emitted = nodes, tree.max_depth, sum(len(p) for p in paths)
            self.recorder.times.append(times)
        if self.trace is not None:
            rounds = trace_rounds(tree, logits, paths, self.emitter, known, self._greedy)
            self.trace.extend(rounds)
            self.recorder.rounds.extend(rounds)

    def _complete_cache(self, final: int) -> None:
        """
        Cache the last token of rows that ended in the last round before others: stock generation has forwarded it.

        One more forward, only for a batch whose cache outlives the call.
        """
        cache = self.verifier.cache
        outlives = self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        ends = zip(self.verifier.lengths, self.emitter.lengths, strict=True)
        missing = [cached < known + self.offset and known < final for cached, known in ends]
        if len(missing) == 1 or not outlives or not any(missing):
            return
        self.verifier.done = [True] * len(missing)
        self.verifier.verify(DraftTree.root_only(self.emitter.newest().to(self.target.device)))
        self.verifier.commit([[0] if m else [] for m in missing])
        self.verifier.outputs = None
        self.statistics.add_rounds([], 0)

    # ------------------------------------------------------------------ result
    def result(self) -> TreeDecodeOutput | torch.LongTensor:
        """Stock's return value; with a dictionary asked for also counts and, if recorded, the rounds."""
        emitter, verifier, config = self.emitter, self.verifier, self.config
        sequences = emitter.sequences()
        self._complete_cache(sequences.shape[1])
        verifier.finish(sequences.shape[1] + self.offset - 1)
        self.statistics.draft_forwards = self.drafter.forwards
        if self.budget is not None:
            self.statistics.plain_rounds = self.budget.plain_rounds
        if not config.return_dict_in_generate:
            return sequences
        new = sequences.shape[1] - emitter.prompt_length
        return TreeDecodeOutput(
            sequences=sequences,
            scores=emitter.per_token(emitter.scores),
            logits=emitter.per_token(emitter.logits),
            hidden_states=None if self.states is None else self.states.result(new),
            attentions=None if self.attentions is None else self.attentions.result(new),
            cache=verifier.cache,
            statistics=self.statistics,
            trace=self.trace,
        )
