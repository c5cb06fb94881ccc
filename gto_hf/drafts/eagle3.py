# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 draft (Li et al. 2025, https://huggingface.co/papers/2503.01840). Level 2.

Module names are those of SafeAILab's checkpoints, so no renaming stands between their files and ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from gto_hf.target import final_norm_scale, unwrap

from .attention import DraftAttention, DraftRotaryEmbedding, KeyValues
from .base import DraftOutput
from .config import DraftConfig
from .fresh import FeatureDraft, copy_weight, last_layer


class Eagle3Layer(GradientCheckpointingLayer):
    """A Llama layer whose attention reads `[norm(embedding); norm(feature)]`; the residual is the raw feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the feature
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, *attention: Any
    ) -> tuple[torch.Tensor, KeyValues]:
        """`embeddings`, `features` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        attended, new = self.self_attn(inputs, *attention)
        features = features + attended
        return features + self.mlp(self.post_attention_layernorm(features)), new


class Eagle3Draft(FeatureDraft):
    """
    One decoder layer over fused low, middle and high features of the target, with its own reduced head.

    `features` returned by [`forward`] are pre-norm: they are what the draft feeds back to itself; the norm belongs to
    the head.
    """

    _no_split_modules = ["Eagle3Layer"]
    draft_type = "eagle3"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.fuse`]."""
        return self.fc(target_features.to(self.device, self.dtype))

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
        """See [`DraftModel.forward`]."""
        embeddings = self.embed(input_ids) if embeddings is None else embeddings
        rotary = self.rotary_emb(embeddings, position_ids)
        past_layer = past[0] if past else None
        nodes_layer = nodes[0] if nodes else None
        features, new = self.midlayer(embeddings, features, rotary, past_layer, past_mask, nodes_layer, node_mask)
        return DraftOutput(features=features, key_values=[new])

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.head`]."""
        return self.lm_head(self.norm(features))

    @torch.no_grad()
    def _copy_from(self, target: nn.Module, *, layer: bool) -> None:
        """
        Start from what the target knows, where the shapes agree.

        Head rows, final norm and own embedding are the target's. The layer starts as the target's last one, reading the
        feature, and `fc` as the highest feature plus a little of the others: the draft then starts in the target's own
        basis, on the scale its head rows expect.
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
        last = last_layer(target)
        if last is None:
            return
        own = dict(self.midlayer.named_parameters())
        for name, weight in last.named_parameters():
            if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
                copy_weight(own[name][:, width:], weight)
            elif name == "input_layernorm.weight":
                copy_weight(own["hidden_norm.weight"], weight)
            elif name in own:
                copy_weight(own[name], weight)
