# SPDX-License-Identifier: Apache-2.0
"""Model cards, and what leaves the machine with a push (level 5)."""

from gto_hf.drafts import DraftModel

from .card import SUMMARY_FILE, draft_card, prepare_push
from .clean import clean_folder, copy_for_push, publishable
from .results import Measured, read_results


DraftModel.prepare_push = staticmethod(prepare_push)

__all__ = [
    "Measured",
    "SUMMARY_FILE",
    "clean_folder",
    "copy_for_push",
    "draft_card",
    "prepare_push",
    "publishable",
    "read_results",
]
