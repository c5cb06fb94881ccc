# SPDX-License-Identifier: Apache-2.0
"""The target's side of decoding: prefill, one forward per round, and what stays in its cache. Level 4."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer

from gto_hf.target import backend_form, boundary_features, layer_kinds, text_config, visible_by_kind
from gto_hf.tree import DraftTree

from .cache import keep_path, keep_paths


class Verifier:
    """
    One target and its cache during one `generate` call.

    Attributes:
        lengths (`list[int]`): Columns of the cache that belong to each row, padding included.
        padding (`torch.LongTensor` of shape `(B, 1)`): Padding columns before each row's text.
        outputs: Of the last forward. size_of_round (`int`): Its nodes, root included.
        forward (`Callable`): The target's forward, compiled where `generate` would compile it.
        done (`list[bool]`): Rows that have ended. prompt_columns (`int`): Columns of the cache after the prefill.

    Args:
        target (`PreTrainedModel`): Unmodified model.
        layers (`list[int]`): Indices into `hidden_states` that the draft reads; none if empty.
        kwargs (`dict`): Model arguments as `generate` prepared them, the cache under `cache`.
        config (`GenerationConfig`): Of this call.
        chain (`bool`): Check chains with the model's own causal mask, one row only.
        size (`int`): Most nodes of a round, root included.
        limit (`int`, *optional*): First position that the target does not have. restore (`Callable`): Called at the end,
            puts layers of the cache back that were exchanged.
        all_states (`bool`): Keep the states of all layers: the user asked for them.
    """

    def __init__(
        self,
        target: Any,
        layers: list[int],
        kwargs: dict[str, Any],
        config: GenerationConfig,
        *,
        chain: bool,
        size: int,
        limit: int | None = None,
        restore: Callable[[], None] = lambda: None,
        all_states: bool = False,
    ) -> None:
        self.target, self.layers, self.chain, self.size = target, layers, chain, size
        self._kwargs, self._config = kwargs, config
        self.limit, self._restore, self.done = limit, restore, []
        self._states: Any = True if all_states else (layers or None)
        self.cache: Any = kwargs["cache"]
        self.outputs: Any = None
        self.lengths: list[int] = []
        self._compiled = target._valid_auto_compile_criteria(kwargs, config)
        self.forward = target.get_compiled_call(config.compile_config) if self._compiled else target.__call__
        self._kinds = layer_kinds(target)
        self._silent: list[Any] = []  # layers of the cache that recorded no past before
        self._buffer: torch.Tensor | None = None
        self._dirty: slice | None = None  # columns of the buffer that the last round wrote

    # ------------------------------------------------------------------ prefill
    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `(B, V)` after the prompt and features `(B, F, k * Ht)` of all that was forwarded."""
        chunks: list[torch.Tensor] = []
        kwargs = {**self._kwargs, **self._wanted_states()}
        thread = threading.get_ident()

        def collect(module: Any, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:  # another call may use the same target at the same time
                chunks.append(self._features(output))

        hook = self.target.register_forward_hook(collect)
        try:
            self.outputs = self.target._prefill(input_ids, self._config, kwargs)  # one forward per chunk
        finally:
            hook.remove()
        self._kwargs = self.target._update_model_kwargs_for_generation(
            self.outputs, self._kwargs, is_encoder_decoder=False, num_new_tokens=1
        )
        self.cache = self._kwargs["cache"]
        rows = self.outputs.logits.shape[0]
        total = int(self.cache.get_seq_length())
        self.prompt_columns, self.lengths = total, [total] * rows
        mask = self._kwargs.get("attention_mask")
        device = self.target.device
        self._known = None if mask is None else mask[:, :total].to(device).bool()
        if self._known is None:
            self.padding = torch.zeros(rows, 1, dtype=torch.long, device=device)
        else:
            self.padding = (self._known.long().cumsum(1) == 0).sum(1, keepdim=True)
        # Sliding and convolution layers forget what rolling back needs, unless told; before the prefill they would keep all.
        self._silent = [layer for layer in self.cache.layers if not getattr(layer, "record_past", True)]
        self.cache.activate_past_recording()
        return self.outputs.logits[:, -1], None if not self.layers else torch.cat(chunks, dim=1)

    def valid_columns(self, count: int) -> torch.Tensor | None:
        """`(B, count)` bool: which of the last prompt columns are not padding; None if all."""
        return None if self._known is None else self._known[:, -count:]

    # ------------------------------------------------------------------ rounds
    def verify(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One target forward over root and nodes: logits `(B, N + 1, V)` and features of all of them."""
        count = tree.tokens.shape[1]
        if self._compiled and 1 < count < self.size:
            tree = tree.padded(self.size)  # one shape, one graph
        size = tree.tokens.shape[1]
        plain = self.chain or (size == 1 and len(self.lengths) == 1)
        kwargs = {k: v for k, v in self._kwargs.items() if k not in ("attention_mask", "position_ids")}
        for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][:, -1:].expand(-1, size)
        position_ids = self._kwargs.get("position_ids")
        if position_ids is not None:
            positions = position_ids[..., -1:] + self._since_prompt(tree)
            if self.limit is not None and any(self.done):
                # A row that has ended may stand right behind the last position.
                done = torch.tensor(self.done, device=positions.device)[:, None]
                positions = torch.where(done, positions.clamp(max=self.limit - 1), positions)
            kwargs["position_ids"] = positions
        inputs = self.target.prepare_inputs_for_generation(
            tree.tokens,
            next_sequence_length=size,
            is_first_iteration=False,
            attention_mask=self._plain_mask(size) if plain else None,
            **kwargs,
        )
        if not plain:
            inputs["attention_mask"] = self._tree_mask(tree)
        inputs.update(self._wanted_states())
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        self.outputs = self.forward(**inputs, return_dict=True)
        self.size_of_round = size
        features = self._features(self.outputs)
        return self.outputs.logits[:, :count], None if features is None else features[:, :count]

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the accepted columns of every row, drop the rest of the tree."""
        if len(paths) == 1:
            keep_path(self.cache, paths[0], self.size_of_round, self.lengths[0] + self.size_of_round)
        else:
            keep_paths(self.cache, paths, self.lengths, self.size_of_round)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def finish(self, columns: int) -> None:
        """Drop what rows wrote past the end of the output, so that the cache ends where stock generation's does."""
        extra = max(self.lengths) - columns
        if extra > 0:
            self.cache.crop(-extra)

    def release(self) -> None:
        """Leave the cache's layers as they were found, however the call has ended."""
        for layer in self._silent:
            layer.record_past = False
        self._restore()

    # ------------------------------------------------------------------ masks
    def _since_prompt(self, tree: DraftTree) -> torch.Tensor:
        """`(B, N + 1)`: tokens between a row's first generated token and each node."""
        if len(self.lengths) == 1:
            return tree.depths + (self.lengths[0] - self.prompt_columns)
        offset = torch.tensor([length - self.prompt_columns for length in self.lengths], device=tree.depths.device)
        return tree.depths + offset[:, None]

    def _plain_mask(self, size: int) -> torch.Tensor | None:
        """The 2-D mask of a chain, as stock generation has it: None without padding."""
        if self._known is None:
            return None
        rest = self.lengths[0] + size - self.prompt_columns
        mask = self._kwargs["attention_mask"][:, : self.prompt_columns]
        return torch.cat([mask, mask.new_ones(len(mask), rest)], dim=1)

    def _tree_mask(self, tree: DraftTree) -> torch.Tensor | dict:
        """What every node may see, in the target's format, for each of its layer types."""
        visible, queries, keys = self._visible(tree)
        size, dtype, masks = tree.tokens.shape[1], self.target.dtype, {}
        for name, kind in self._kinds.items():
            length, offset = self._columns(name, size)
            seen = visible[:, :, offset : offset + length]
            if not kind.is_full:
                seen = visible_by_kind(kind, seen, queries, keys[:, offset : offset + length])
            masks[name] = backend_form(self.target, seen, dtype)
        return masks.get(None, masks)

    def _visible(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        `(B, N + 1, C)` visibility over all columns of the cache, and the index in its text of each node and column.

        Columns: what the longest row knows, then the tree, then (static caches) room.
        """
        rows, size = tree.tokens.shape
        device = self.target.device
        past, width = max(self.lengths), self._width(size)
        visible = self._reuse(rows, size, width, device)
        # One row without padding sees all of the past: the buffer holds that already.
        if rows > 1 or self._known is not None:
            visible[:, :, :past] = self._live(past)[:, None]
        visible[:, :, past : past + size] = tree.ancestor_mask()
        visible[:, :, past + size :] = False
        if all(kind.is_full for kind in self._kinds.values()):
            return visible, self.padding, self.padding
        nodes = self._lengths_column() + tree.depths - self.padding
        keys = (torch.arange(width, device=device) - self.padding).clone()
        keys[:, past : past + size] = nodes
        return visible, nodes, keys

    def _live(self, past: int) -> torch.Tensor:
        """`(B, past)`: columns that belong to a row's text."""
        columns = torch.arange(past, device=self.target.device)
        live = columns < self._lengths_column()
        if self._known is not None:
            live[:, : self.prompt_columns] &= self._known
        return live

    def _lengths_column(self) -> torch.Tensor:
        return torch.tensor(self.lengths, device=self.target.device)[:, None]

    def _reuse(self, rows: int, size: int, width: int, device: torch.device) -> torch.Tensor:
        """A `(B, size, width)` view of a buffer that is all true in what was past before."""
        buffer = self._buffer
        if buffer is None or buffer.shape[1] < size or buffer.shape[2] < width:
            shape = (rows, max(size, self.size), width + 256)
            self._buffer = buffer = torch.ones(shape, dtype=torch.bool, device=device)
        elif self._dirty:
            buffer[:, :, self._dirty] = True
        past = max(self.lengths)
        self._dirty = slice(past, width)
        return buffer[:, :size, :width]

    def _width(self, size: int) -> int:
        """Columns of the cache during this round."""
        layer = next(layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None)
        return layer.max_cache_len if isinstance(layer, StaticLayer) else max(self.lengths) + size

    def _columns(self, name: str | None, size: int) -> tuple[int, int]:
        """Length and offset of what layers of a type hold, the tree included."""
        types = getattr(text_config(self.target), "layer_types", None)
        for index, layer in enumerate(self.cache.layers):
            of_type = name is None or types is None or types[index] == name
            if of_type and getattr(layer, "keys", None) is not None:
                return self.cache.get_mask_sizes(size, index)
        return self._width(size), 0

    # ------------------------------------------------------------------ states
    def _wanted_states(self) -> dict[str, Any]:
        return {} if self._states is None else {"output_hidden_states": self._states}

    def _features(self, outputs: Any) -> torch.Tensor | None:
        """`(B, F, k * Ht)`, or None for drafts that read none."""
        return boundary_features(outputs.hidden_states, self.layers) if self.layers else None
