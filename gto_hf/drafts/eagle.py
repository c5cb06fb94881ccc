# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-1/2 draft (Li et al. 2024, https://huggingface.co/papers/2401.15077), which HASS trains too. Level 2.

Module names are those of SafeAILab's checkpoints, so no renaming stands between their files and ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from .attention import DraftAttention, KeyValues
from .config import DraftConfig
from .last_feature import LastFeatureDraft


class EagleLayer(GradientCheckpointingLayer):
    """A Llama layer without a norm before its attention, unless the config asks for `layernorms`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = _norm(config) if config.layernorms else nn.Identity()
        self.post_attention_layernorm = _norm(config)

    def forward(self, inputs: torch.Tensor, *attention: Any) -> tuple[torch.Tensor, KeyValues]:
        """`inputs` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        attended, new = self.self_attn(self.input_layernorm(inputs), *attention)
        outputs = inputs + attended
        return outputs + self.mlp(self.post_attention_layernorm(outputs)), new


class EagleDraft(LastFeatureDraft):
    """
    One decoder layer over `fc([embedding; feature])`, whose output is the next feature and what the target's head reads.

    With `layernorms` (a variant of HASS) the embedding, the attention's input and the head's input are normalised.
    """

    _no_split_modules = ["EagleLayer"]
    draft_type = "eagle"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        if config.layernorms:
            self.embedding_layernorm, self.pre_lm_head_layernorm = _norm(config), _norm(config)
        self.post_init()

    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See [`LastFeatureDraft.inputs`]: the embedding comes first."""
        if self.config.layernorms:
            embeddings = self.embedding_layernorm(embeddings)
        return self.fc(torch.cat([embeddings, features], dim=-1))

    def read_by_head(self, outputs: torch.Tensor) -> torch.Tensor:
        """See [`LastFeatureDraft.read_by_head`]."""
        return self.pre_lm_head_layernorm(outputs) if self.config.layernorms else outputs


def _norm(config: DraftConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
