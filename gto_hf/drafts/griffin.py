# SPDX-License-Identifier: Apache-2.0
"""
GRIFFIN's token-alignable draft (Hu et al. 2025, https://huggingface.co/papers/2502.11018). Level 2.

Module names are those of the released checkpoints, so no renaming stands between their files and ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import DraftAttention, KeyValues
from .config import DraftConfig
from .last_feature import LastFeatureDraft


class GriffinFusion(nn.Module):
    """Joins embedding and feature: a linear layer, and a gateless MLP that compares the result with the embedding."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GriffinFusionMLP(config)

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`embeddings`, `features` `(rows, F, H)` to `(rows, F, H)`."""
        joined = self.fc(torch.cat([embeddings, features], dim=-1))
        return joined + self.mlp(self.post_attention_layernorm(joined), embeddings)


class GriffinFusionMLP(nn.Module):
    """Both inputs go through one norm."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, joined: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Two inputs `(rows, F, H)` to `(rows, F, H)`."""
        both = torch.cat([self.input_layernorm(joined), self.input_layernorm(embeddings)], dim=-1)
        return self.down_proj(self.act_fn(self.up_proj(both)))


class GriffinMLP(nn.Module):
    """A gated MLP that writes two vectors."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, 2 * config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(rows, F, H)` to `(rows, F, 2 * H)`."""
        return self.down_proj(self.act_fn(self.gate_proj(inputs)) * self.up_proj(inputs))


class GriffinLayer(GradientCheckpointingLayer):
    """A Llama layer without a norm before its attention, with one output for the head and one for the next pair."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = GriffinMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, *attention: Any) -> tuple[torch.Tensor, KeyValues]:
        """`inputs` `(rows, F, H)` to `(rows, F, 2 * H)`; `attention` is passed to [`DraftAttention`] as it is."""
        attended, new = self.self_attn(inputs, *attention)
        outputs = inputs + attended
        return torch.cat([outputs, outputs], dim=-1) + self.mlp(self.post_attention_layernorm(outputs)), new


class GriffinDraft(LastFeatureDraft):
    """
    One decoder layer with two outputs, side by side: `predict`, which the target's head reads, and `regress`, the next
    pair's feature. What it says and what it goes on with need not be one vector.
    """

    _no_split_modules = ["GriffinLayer"]
    draft_type = "griffin"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.fc = GriffinFusion(config)
        self.layers = nn.ModuleList([GriffinLayer(config)])
        self.post_init()

    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See [`LastFeatureDraft.inputs`]."""
        return self.fc(embeddings, features)

    @property
    def joint(self) -> nn.Linear:
        """See [`LastFeatureDraft.joint`]."""
        return self.fc.fc
