# SPDX-License-Identifier: Apache-2.0
"""
This metric's page where the folder is a Space of the Hub: counts in as JSON, figures out. Level 0: a script of its own.

`evaluate`'s own widget needs a gradio of before version 4, so this is not it.
"""

import json
from pathlib import Path
from typing import Any

import evaluate
import gradio


HERE = Path(__file__).resolve().parent
EXAMPLE = {"histograms": [[1, 0, 1], [0, 0, 1, 1]]}
SCRIPT = str(HERE / "acceptance_by_depth.py")


def compute(arguments: str) -> dict[str, Any]:
    """What the metric's `compute(**arguments)` gives; its own words where it refuses."""
    try:
        given = json.loads(arguments)
        if not isinstance(given, dict) or set(given) != set(EXAMPLE):
            raise ValueError(f"Give a JSON object with {', '.join(EXAMPLE)}, such as {json.dumps(EXAMPLE)}.")
        return evaluate.load(SCRIPT, keep_in_memory=True).compute(**given)
    except (TypeError, ValueError) as error:
        raise gradio.Error(str(error)) from error


page = gradio.Interface(
    compute,
    gradio.Code(json.dumps(EXAMPLE), language="json", label="arguments of compute"),
    gradio.JSON(label="acceptance_by_depth"),
    title="acceptance_by_depth",
    article=(HERE / "README.md").read_text(encoding="utf-8").split("---\n", 2)[2],
    flagging_mode="never",
)

if __name__ == "__main__":
    page.launch()
