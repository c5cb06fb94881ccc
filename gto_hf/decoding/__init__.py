# SPDX-License-Identifier: Apache-2.0
"""Lossless decoding with draft trees inside stock `generate` (level 4)."""

from .decoder import TreeDecoder
from .hook import install, uninstall
from .loop import TreeDecodeOutput, tree_decode
from .request import as_draft
from .statistics import DecodingStatistics


__all__ = [
    "DecodingStatistics",
    "TreeDecodeOutput",
    "TreeDecoder",
    "as_draft",
    "install",
    "tree_decode",
    "uninstall",
]
