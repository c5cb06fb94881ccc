# SPDX-License-Identifier: Apache-2.0
"""Training text (level 5): rows for the trainer, and answers written by the target itself."""

from .regenerate import regenerate
from .rows import load_jsonl, render_prompt, training_rows


__all__ = ["load_jsonl", "regenerate", "render_prompt", "training_rows"]
