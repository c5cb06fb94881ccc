# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 draft (Li et al. 2025, https://huggingface.co/papers/2503.01840) and its later variants. Level 2.

Module names are those of SafeAILab's checkpoints, so no renaming stands between their files and ours. What others added
(norms before the fusion, a normed output: "EAGLE-3.1") are fields of the config, off by default; names are then vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from gto_hf.target import final_norm_scale, unwrap

from .attention import DraftAttention, DraftRotaryEmbedding, KeyValues, narrow_to_window
from .base import DraftOutput
from .config import DraftConfig
from .fresh import FeatureDraft, copy_weight, last_layers


class Eagle3Layer(GradientCheckpointingLayer):
    """A Llama layer whose attention reads `[norm(embedding); norm(feature)]`; the residual is the raw or normed feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the feature
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, *attention: Any
    ) -> tuple[torch.Tensor, KeyValues]:
        """`embeddings`, `features` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, new = self.self_attn(inputs, *attention)
        features = (normed if self.norm_before_residual else features) + attended
        return features + self.mlp(self.post_attention_layernorm(features)), new


class PlainLayer(GradientCheckpointingLayer):
    """An ordinary Llama layer: those above the first one, which alone sees embeddings."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, features: torch.Tensor, *attention: Any) -> tuple[torch.Tensor, KeyValues]:
        """`features` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        attended, new = self.self_attn(self.input_layernorm(features), *attention)
        features = features + attended
        return features + self.mlp(self.post_attention_layernorm(features)), new


class Eagle3Draft(FeatureDraft):
    """
    One decoder layer (or more) over fused low, middle and high features of the target, with its own reduced head.

    `features` returned by [`forward`] are what the draft feeds back to itself: pre-norm, and the norm belongs to the head;
    with `config.norm_output` they are normed already.
    """

    _no_split_modules = ["Eagle3Layer", "PlainLayer"]
    draft_type = "eagle3"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        count, width, eps = len(config.feature_layers), config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(count * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, config.hidden_size, bias=config.fc_bias)
        self.midlayer = Eagle3Layer(config)
        # Named by their place in the stack, as speculators names them; the first layer keeps SafeAILab's name.
        self.layers = nn.ModuleDict({str(i): PlainLayer(config) for i in range(1, config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.fuse`]."""
        features = target_features.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[KeyValues] | None,
        past_mask: torch.Tensor,
        nodes: list[KeyValues] | None = None,
        node_mask: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> DraftOutput:
        """
        See [`DraftModel.forward`]. With a window the last entry of `key_values` holds the positions `(rows, 1, F, 1)`.
        """
        embeddings = self.embed(input_ids) if embeddings is None else embeddings
        rotary = self.rotary_emb(embeddings, position_ids)
        window, key_values = self.config.sliding_window, []
        if window is not None:
            known = [None if cache is None else cache[-1][0][:, 0, :, 0] for cache in (past, nodes)]
            past_mask, node_mask = narrow_to_window(window, position_ids, known[0], past_mask, known[1], node_mask)
        for i, layer in enumerate((self.midlayer, *self.layers.values())):
            states = (embeddings, features) if i == 0 else (features,)
            past_layer, nodes_layer = past[i] if past else None, nodes[i] if nodes else None
            features, new = layer(*states, rotary, past_layer, past_mask, nodes_layer, node_mask)
            key_values.append(new)
        if window is not None:
            own = position_ids[:, None, :, None]
            key_values.append((own, own))
        return DraftOutput(self.norm(features) if self.config.norm_output else features, key_values)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.head`]."""
        return self.lm_head(features if self.config.norm_output else self.norm(features))

    @torch.no_grad()
    def _copy_from(self, target: nn.Module, *, layer: bool) -> None:
        """
        Start from what the target knows, where the shapes agree.

        Head rows, final norm and own embedding are the target's. The layers start as the target's last ones, the first of
        them reading the feature, and `fc` as the highest feature plus a little of the others: the draft then starts in the
        target's own basis, on the scale its head rows expect.
        """
        model = unwrap(target)
        head = model.get_output_embeddings()
        copy_weight(self.lm_head.weight, getattr(head, "weight", None), rows=self.kept_ids)
        copy_weight(self.norm.weight, final_norm_scale(target))
        if self.config.own_embeddings:
            copy_weight(self.embed_tokens.weight, model.get_input_embeddings().weight)
        width = self.config.hidden_size
        if self.config.target_hidden_size != width or not layer:
            return
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, dtype=self.dtype, device=self.device)
        own = (self.midlayer, *self.layers.values())
        for to, source in zip(own, last_layers(target, len(own)), strict=False):
            _copy_layer(to, source)


def _copy_layer(layer: nn.Module, source: nn.Module) -> None:
    """Start a draft's layer as one of its target's; a first layer reads in it the feature, its embedding stays random."""
    own = dict(layer.named_parameters())
    fused = "hidden_norm.weight" in own
    for name, weight in source.named_parameters():
        if fused and name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            copy_weight(own[name][:, own[name].shape[1] // 2 :], weight)
        elif fused and name == "input_layernorm.weight":
            copy_weight(own["hidden_norm.weight"], weight)
        elif name in own:
            copy_weight(own[name], weight)
