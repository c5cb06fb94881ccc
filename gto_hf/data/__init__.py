# SPDX-License-Identifier: Apache-2.0
"""Training text (level 4): rows for the trainer, and answers written by the target itself."""

from .encode import RowEncoder
from .regenerate import regenerate
from .rows import dataset_token_counts, load_jsonl, render_prompt, training_rows
from .split import hold_out


__all__ = [
    "RowEncoder",
    "dataset_token_counts",
    "hold_out",
    "load_jsonl",
    "regenerate",
    "render_prompt",
    "training_rows",
]
