# SPDX-License-Identifier: Apache-2.0
"""Acceptance length and speed-up on question sets (level 5)."""

from .counts import Counts, expected_acceptance, simulated_tau
from .draw import draw_tree, rich_tree
from .layers import LayerAgreement, layer_agreement
from .lossless import CheckReport, Divergence, LosslessReport, check, verify_lossless
from .misalignment import Misalignment, misalignment, misalignment_table
from .prompts import OWN_SETS, Question, QuestionSet, load_questions, load_set, prompts_hash, spread
from .replay import Replay, Text, read_texts, replay
from .report import Result, report_text, summarize, write_report
from .runs import PLAIN, PromptRun, SystemRun, agreement, answer
from .session import Detail, Measured, compare, measure
from .table import results_table


__all__ = [
    "CheckReport",
    "Counts",
    "Detail",
    "Divergence",
    "LayerAgreement",
    "LosslessReport",
    "Measured",
    "Misalignment",
    "OWN_SETS",
    "PLAIN",
    "PromptRun",
    "Question",
    "QuestionSet",
    "Replay",
    "Result",
    "SystemRun",
    "Text",
    "agreement",
    "answer",
    "check",
    "compare",
    "draw_tree",
    "expected_acceptance",
    "layer_agreement",
    "load_questions",
    "load_set",
    "measure",
    "misalignment",
    "misalignment_table",
    "prompts_hash",
    "read_texts",
    "replay",
    "report_text",
    "results_table",
    "rich_tree",
    "simulated_tau",
    "spread",
    "summarize",
    "verify_lossless",
    "write_report",
]
