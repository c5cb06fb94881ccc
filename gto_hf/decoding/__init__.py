# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding with draft trees inside stock `generate` (level 4)."""

from .costs import context_range
from .decoder import TreeDecoder
from .hook import install, uninstall
from .loop import tree_decode
from .outputs import TreeDecodeOutput
from .request import as_draft
from .statistics import DecodingStatistics
from .trace import Recorder, RoundTimes, RoundTrace, record_rounds


__all__ = [
    "DecodingStatistics",
    "Recorder",
    "RoundTimes",
    "RoundTrace",
    "TreeDecodeOutput",
    "TreeDecoder",
    "as_draft",
    "context_range",
    "install",
    "record_rounds",
    "tree_decode",
    "uninstall",
]
