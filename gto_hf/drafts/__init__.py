# SPDX-License-Identifier: Apache-2.0
"""Draft models (level 2): one interface, one class per architecture."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .base import DraftCheckpointError, DraftModel, DraftOutput, check_loaded, check_values, reference_copy
from .causal_lm import CausalLMDraft
from .config import DraftConfig, check_tree
from .eagle import EagleDraft
from .eagle3 import Eagle3Draft
from .fresh import FeatureDraft
from .griffin import GriffinDraft
from .last_feature import LastFeatureDraft
from .prefix import DraftPrefix, NodeSteps
from .vocab import check_vocab_buffers, choose_draft_vocab, count_tokens, vocab_buffers


# A new architecture is one file, one line here and one row in the contract tests.
DRAFTS: dict[str, type[DraftModel]] = {
    "eagle3": Eagle3Draft,
    "eagle": EagleDraft,
    "griffin": GriffinDraft,
    "causal_lm": CausalLMDraft,
}

AutoConfig.register(DraftConfig.model_type, DraftConfig, exist_ok=True)
AutoModel.register(DraftConfig, Eagle3Draft, exist_ok=True)
# Drafts are no language models, but people load them like that: it gives the draft, or an error that names `AutoDraft`.
AutoModelForCausalLM.register(DraftConfig, Eagle3Draft, exist_ok=True)

__all__ = [
    "CausalLMDraft",
    "DRAFTS",
    "DraftCheckpointError",
    "DraftConfig",
    "DraftModel",
    "DraftOutput",
    "DraftPrefix",
    "Eagle3Draft",
    "EagleDraft",
    "FeatureDraft",
    "GriffinDraft",
    "LastFeatureDraft",
    "NodeSteps",
    "check_loaded",
    "check_tree",
    "check_values",
    "check_vocab_buffers",
    "choose_draft_vocab",
    "count_tokens",
    "reference_copy",
    "vocab_buffers",
]
