# SPDX-License-Identifier: Apache-2.0
"""
Attention of a draft layer: to a known prefix, and from the nodes of many trees to prefix and ancestors at once.

Level 2. Knows no trees or vocabularies, only masks. The projections may read a wider input than they write (EAGLE-3
reads `[embedding; feature]`). The parts themselves are Llama's, from transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb  # Llama's, on a share of each head too
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gto_hf.target import LayerKind, visible_by_kind

from .config import DraftConfig


# Keys and values of one layer, each (rows, key/value heads, length, head_dim).
KeyValues = tuple[torch.Tensor, torch.Tensor]


def append(past: KeyValues | None, new: KeyValues) -> KeyValues:
    """`past` followed by `new` along the length."""
    return new if past is None else (torch.cat([past[0], new[0]], 2), torch.cat([past[1], new[1]], 2))


def attend_prefix(query: torch.Tensor, past: KeyValues, mask: torch.Tensor) -> torch.Tensor:
    """
    Ordinary attention of `query` `(P, h, F, d)` to `past`; `mask` `(P, F, T)` bool, true = visible.

    Returns:
        `(P, h, F, d)`. Rows that see nothing give zeros.
    """
    keys, values = past
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None], enable_gqa=True)


def attend_prefix_and_nodes(
    query: torch.Tensor, prefix: KeyValues, prefix_mask: torch.Tensor, nodes: KeyValues, node_mask: torch.Tensor
) -> torch.Tensor:
    """
    Attention of `F` nodes of each of `R` trees to a prefix, shared by `R / P` trees, and to nodes of their own tree.

    Equal to concatenating prefix and node keys per tree, without copying the prefix once per tree.

    Args:
        query (`(R, h, F, d)`): Tree `r` belongs to prefix `r // (R / P)`.
        prefix (keys and values `(P, h_kv, T, d)`): Shared prefixes.
        prefix_mask (`(R, T)` or `(R, F, T)` bool): Prefix positions that a tree's root, or each node, sees.
        nodes (keys and values `(R, h_kv, S, d)`): Nodes expanded so far, these `F` last.
        node_mask (`(R, F, S)` bool): A node itself and its ancestors.

    Returns:
        `(R, h, F, d)`.
    """
    rows, heads, width, dim = query.shape
    prefixes, kv_heads, length, _ = prefix[0].shape
    size = nodes[0].shape[2]
    trees, groups = rows // prefixes, heads // kv_heads
    # (R, h_kv, G, F, d): heads that share keys stand together, so no key is repeated.
    query = query.reshape(rows, kv_heads, groups, width, dim) * dim**-0.5
    # Prefix scores: all trees of a prefix are one long query.
    flat = query.reshape(prefixes, trees, kv_heads, groups * width, dim).transpose(1, 2)
    flat = flat.reshape(prefixes, kv_heads, trees * groups * width, dim)
    to_prefix = (flat @ prefix[0].transpose(2, 3)).view(prefixes, kv_heads, trees, groups, width, length)
    to_prefix = to_prefix.masked_fill(~prefix_mask.reshape(prefixes, 1, trees, 1, -1, length), -torch.inf)
    # Node scores: every tree for itself.
    to_nodes = (query.flatten(2, 3) @ nodes[0].transpose(2, 3)).view(rows, kv_heads, groups, width, size)
    to_nodes = to_nodes.masked_fill(~node_mask[:, None, None], -torch.inf)
    to_nodes = to_nodes.view(prefixes, trees, kv_heads, groups, width, size).transpose(1, 2)
    # A node always sees itself, so no row is empty and the softmax is finite.
    weights = torch.cat([to_prefix, to_nodes], -1).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.to(query.dtype)
    out = weights[..., :length].reshape(prefixes, kv_heads, -1, length) @ prefix[1]
    out = out.reshape(prefixes, kv_heads, trees, groups * width, dim).transpose(1, 2).reshape(rows, kv_heads, -1, dim)
    own = weights[..., length:].transpose(1, 2).reshape(rows, kv_heads, groups * width, size) @ nodes[1]
    return (out + own).reshape(rows, heads, width, dim)


def narrow_to_window(
    window: int,
    positions: torch.Tensor,
    past: torch.Tensor | None,
    past_mask: torch.Tensor,
    nodes: torch.Tensor | None = None,
    node_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Masks of [`DraftAttention.forward`], narrowed to the last `window` positions before each query, its own included.

    Args:
        positions (`torch.LongTensor` of shape `(rows, F)`): Of the queries; siblings of a tree share one.
        past (`torch.LongTensor` of shape `(P, T)`, *optional*): Of the prefix.
        nodes (`torch.LongTensor` of shape `(R, S - F)`, *optional*): Of the nodes so far.

    Returns:
        `past_mask` `(P, F, T + F)`, or for nodes `(R, F, T)`, and `node_mask` `(R, F, S)`.
    """
    kind = LayerKind(window=window)
    if node_mask is None:
        keys = positions if past is None else torch.cat([past, positions], 1)
        return visible_by_kind(kind, past_mask, positions, keys), None
    keys = past.repeat_interleave(len(positions) // len(past), 0)
    own = positions if nodes is None else torch.cat([nodes, positions], 1)
    return (
        visible_by_kind(kind, past_mask[:, None], positions, keys),
        visible_by_kind(kind, node_mask, positions, own),
    )


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's rotary embedding, also for a share of each head's dimensions, whose frequencies stay in float32 when the model is
    cast; half precision loses positions.
    """

    @staticmethod
    def compute_default_rope_parameters(config: DraftConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `(rotary_dim / 2,)` and the factor on cosine and sine, 1."""
        dim = config.rotary_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        exact = {name: buffer for name, buffer in self.named_buffers(recurse=False) if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype and not moved.is_meta:
                setattr(self, name, buffer.to(moved.device))
        return self


class DraftAttention(nn.Module):
    """Grouped-query attention whose projections read `input_size` features and write `hidden_size`."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(input_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        norm = partial(nn.RMSNorm, self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(
        self,
        inputs: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        past: KeyValues | None,
        past_mask: torch.Tensor,
        nodes: KeyValues | None,
        node_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, KeyValues]:
        """
        Attend and return what the new positions add to the cache.

        Without `node_mask` the inputs `(P, F, input_size)` extend the prefix `past` and `past_mask` is `(P, F, T + F)`.
        With it they are nodes `(R, F, input_size)` and the arguments are those of [`attend_prefix_and_nodes`], `nodes`
        without the new ones.

        Returns:
            Output `(rows, F, hidden_size)` and the new keys and values `(rows, h_kv, F, d)`.
        """
        rows, width, _ = inputs.shape
        query, key, value = (
            proj(inputs).view(rows, width, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(self.q_norm(query), self.k_norm(key), *rotary)
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves the angles in float32
        new = (key, value)
        if node_mask is None:
            out = attend_prefix(query, append(past, new), past_mask)
        else:
            out = attend_prefix_and_nodes(query, past, past_mask, append(nodes, new), node_mask)
        return self.o_proj(out.transpose(1, 2).reshape(rows, width, -1)), new
