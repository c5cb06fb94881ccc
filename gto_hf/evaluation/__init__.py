# SPDX-License-Identifier: Apache-2.0
"""Acceptance length and speed-up on question sets (level 5)."""

from .draw import draw_tree, rich_tree
from .layers import LayerAgreement, layer_agreement
from .lossless import CheckReport, Divergence, LosslessReport, check, verify_lossless
from .misalignment import Misalignment, misalignment, misalignment_table
from .prompts import OWN_SETS, Question, load_questions, prompts_hash, spread
from .replay import Replay, Text, read_texts, replay
from .runs import PLAIN, PromptRun, SystemRun, agreement, answer, compare
from .table import results_table


__all__ = [
    "CheckReport",
    "Divergence",
    "LayerAgreement",
    "LosslessReport",
    "Misalignment",
    "OWN_SETS",
    "PLAIN",
    "PromptRun",
    "Question",
    "Replay",
    "SystemRun",
    "Text",
    "agreement",
    "answer",
    "check",
    "compare",
    "draw_tree",
    "layer_agreement",
    "load_questions",
    "misalignment",
    "misalignment_table",
    "prompts_hash",
    "read_texts",
    "replay",
    "results_table",
    "rich_tree",
    "spread",
    "verify_lossless",
]
