# SPDX-License-Identifier: Apache-2.0
"""
The decoding loop: draft a tree, check it in one target forward, keep what the target would have written. Level 4.

The draft's keys and values are rebuilt every round from the target's true features; nothing drafted survives in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gto_hf.drafts import DraftModel, DraftPrefix, NodeSteps
from gto_hf.target import backend_mask, position_limit
from gto_hf.tree import DraftTree, TreeConfig, grow_trees

from .cache import keep_path
from .request import check_inputs, check_mode
from .statistics import DecodingStatistics
from .walk import Emitter, walk


@dataclass
class TreeDecodeOutput(GenerateDecoderOnlyOutput):
    """
    Stock `generate` output plus counts.

    Args:
        statistics ([`DecodingStatistics`]): Rounds, accepted lengths, drafted tokens, forwards.
    """

    statistics: DecodingStatistics | None = None


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
        input_ids (`torch.LongTensor` of shape `(1, L)`): Prompt.
        draft ([`DraftModel`]): Its `tree` says how large a tree to draft.
        streamer (`BaseStreamer`, *optional*): Gets the tokens of every round at once; `end()` is called once.

    Returns:
        What stock `generate` returns: ids `(1, L + new)`, or a [`TreeDecodeOutput`].

    Raises:
        ValueError: See [`check_mode`] and [`check_inputs`]; before any forward.
    """
    check_mode(target, draft, generation_config)
    check_inputs(target, input_ids, generation_config, model_kwargs)
    draft.attach(target)
    model_kwargs.pop("synced_gpus", None)
    emitter = Emitter(input_ids, logits_processor, stopping_criteria, generation_config)
    verifier = _Verifier(target, draft, model_kwargs)
    statistics = DecodingStatistics(runs=1, target_forwards=1)

    logits, features, positions = verifier.prefill(input_ids, generation_config)
    emitter.emit(logits)
    statistics.emitted_tokens = 1
    _stream(streamer, emitter, 1)
    drafter = _Drafter(draft)
    if not emitter.finished:
        count = features.shape[1]
        drafter.read(features, emitter.input_ids[:, -count:], positions, verifier.valid_columns(count))
    limit = position_limit(target)
    with target._optimize_model_for_decode():
        while not emitter.finished:
            tree = drafter.grow(emitter.input_ids[:, -1], _room(emitter, generation_config.max_length, limit))
            logits, features, positions = verifier.verify(tree)
            path, accepted = walk(tree, logits, emitter)
            verifier.commit(path, tree)
            statistics.add_round(accepted, len(path) > accepted, tree.tokens.shape[1] - 1)
            _stream(streamer, emitter, len(path))
            if not emitter.finished:
                drafter.read(features[:, path], emitter.input_ids[:, -len(path) :], positions[:, path])
    if streamer is not None:
        streamer.end()
    statistics.draft_forwards = drafter.forwards
    if not generation_config.return_dict_in_generate:
        return emitter.input_ids
    return TreeDecodeOutput(
        sequences=emitter.input_ids,
        scores=None if emitter.scores is None else tuple(emitter.scores),
        logits=None if emitter.logits is None else tuple(emitter.logits),
        cache=verifier.cache,
        statistics=statistics,
    )


def _room(emitter: Emitter, max_length: int, position_limit: int | None) -> int:
    """Levels that a tree below the newest token may have: the bonus token and the target's positions must fit."""
    length = emitter.input_ids.shape[1]
    room = max_length - length - 1
    return room if position_limit is None else min(room, position_limit - length)


def _stream(streamer: Any, emitter: Emitter, count: int) -> None:
    """Hand the last `count` tokens to the streamer."""
    if streamer is not None:
        streamer.put(emitter.input_ids[0, -count:].cpu())


class _Drafter:
    """The draft's side: reads accepted tokens with true features, grows the next tree."""

    def __init__(self, draft: DraftModel) -> None:
        self.draft, self.prefix, self.forwards = draft, DraftPrefix(draft), 0
        self._last: torch.Tensor | None = None  # output of the newest pair, (1, 1, H)
        self._position: torch.Tensor | None = None  # its rotary position, (1,)

    def read(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        valid: torch.Tensor | None = None,
    ) -> None:
        """Append pairs of target features `(1, F, k * Ht)` and the tokens after them."""
        self._last = self.prefix.extend(features, tokens, positions, valid)[:, -1:]
        self._position = positions[:, -1].to(self.draft.device)
        self.forwards += 1

    def grow(self, root_token: torch.Tensor, room: int) -> DraftTree:
        """The tree below the newest token, at most `room` levels deep; a bare root if there is no room."""
        if room < 1:
            return DraftTree.root_only(root_token)
        config: TreeConfig = self.draft.tree.limited(room)
        steps = NodeSteps(self.prefix, self._position, self.prefix.valid)
        root = steps.expand(self._last, config.top_k)
        tree = grow_trees(steps.step, root_token.to(self.draft.device), root, config)
        self.forwards += config.depth - 1
        return tree.to(root_token.device)


class _Verifier:
    """The target's side: prefill, one forward per tree, and what stays in the cache."""

    def __init__(self, target: Any, draft: DraftModel, model_kwargs: dict[str, Any]) -> None:
        self.target, self.layers = target, list(draft.config.feature_layers)
        self._kwargs = model_kwargs
        self.cache: Any = None

    def prefill(
        self, input_ids: torch.Tensor, config: GenerationConfig
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `(1, V)` after the prompt, features `(1, F, k * Ht)` and positions `(1, F)` of what was forwarded."""
        kwargs = {**self._kwargs, "output_hidden_states": self.layers}
        outputs = self.target._prefill(input_ids, config, kwargs)
        features = self._features(outputs)
        positions = self._kwargs["position_ids"][..., -features.shape[1] :]
        self._update(outputs, 1)
        return outputs.logits[:, -1], features, positions

    def valid_columns(self, count: int) -> torch.Tensor | None:
        """`(1, count)` bool: which of the last prompt columns are not padding; None if all."""
        mask = self._kwargs.get("attention_mask")
        return None if mask is None else mask[:, :-1][:, -count:].bool()

    def verify(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One target forward over root and nodes: logits `(N + 1, V)`, features and positions of all of them."""
        size, device = tree.tokens.shape[1], tree.tokens.device
        past = self.cache.get_seq_length()
        known = self._kwargs.get("attention_mask")
        known = torch.ones(1, past, dtype=torch.bool, device=device) if known is None else known[:, :past].bool()
        visible = torch.cat([known[:, None].expand(1, size, past), tree.ancestor_mask()], dim=-1)
        positions = self._kwargs["position_ids"][..., -1:] + tree.depths
        kwargs = {k: v for k, v in self._kwargs.items() if k not in ("attention_mask", "position_ids")}
        inputs = self.target.prepare_inputs_for_generation(
            tree.tokens, next_sequence_length=size, is_first_iteration=False, position_ids=positions, **kwargs
        )
        inputs["attention_mask"] = backend_mask(self.target, visible.to(self.target.device), self.target.dtype)
        inputs["output_hidden_states"] = self.layers
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        self._outputs = self.target(**inputs, return_dict=True)
        return self._outputs.logits[0], self._features(self._outputs), positions

    def commit(self, path: list[int], tree: DraftTree) -> None:
        """Keep the accepted rows of the cache and advance masks and positions by what was emitted."""
        keep_path(self.cache, path, tree.tokens.shape[1])
        self._update(self._outputs, len(path))
        self._outputs = None

    def _update(self, outputs: Any, count: int) -> None:
        self._kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=False, num_new_tokens=count
        )
        self.cache = self._kwargs["cache"]

    def _features(self, outputs: Any) -> torch.Tensor:
        """Concatenated boundaries `(1, F, k * Ht)`, low to high, gathered on one device."""
        states = [outputs.hidden_states[i] for i in self.layers]
        return torch.cat([s.to(states[-1].device) for s in states], dim=-1)
