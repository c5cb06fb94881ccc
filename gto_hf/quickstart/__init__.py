# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/quickstart.py` (level 7)."""

from .model import SMOLLM2, load_target, shipped_draft, target_source
from .table import write_table
from .training import SMOKE, TREE, Budget, fresh_draft, load_rows, train


__all__ = [
    "SMOKE",
    "SMOLLM2",
    "TREE",
    "Budget",
    "fresh_draft",
    "load_rows",
    "load_target",
    "shipped_draft",
    "target_source",
    "train",
    "write_table",
]
