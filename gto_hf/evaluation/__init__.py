# SPDX-License-Identifier: Apache-2.0
"""Acceptance length and speed-up on question sets (level 5)."""

from .prompts import OWN_SETS, Question, load_questions, prompts_hash, spread
from .runs import PLAIN, PromptRun, SystemRun, agreement, answer, compare
from .table import results_table


__all__ = [
    "OWN_SETS",
    "PLAIN",
    "PromptRun",
    "Question",
    "SystemRun",
    "agreement",
    "answer",
    "compare",
    "load_questions",
    "prompts_hash",
    "results_table",
    "spread",
]
