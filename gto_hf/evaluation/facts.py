# SPDX-License-Identifier: Apache-2.0
"""What figures must be read with, and what answers of an interrupted run must share. Level 5."""

from __future__ import annotations

import argparse
import hashlib
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from gto_hf.target import weights_hash

from .bench import System
from .prompts import Question, prompts_hash
from .runs import generation_facts
from .session import Detail
from .systems import Baseline, describe


TREES = "trees (root excluded)"  # key of `settings`
# Where models came from and when: equal weights give equal answers wherever they lie.
WHEREABOUTS = {"target", "target revision", "drafts", "baselines", "date"}


def settings(
    args: argparse.Namespace,
    questions: list[Question],
    trees: dict[str, dict],
    drafts: dict[str, Any],
    target: Any,
    baselines: Iterable[Baseline] = (),
) -> dict[str, Any]:
    """
    What a figure must be read with, in JSON values.

    Args:
        args (`argparse.Namespace`): Options of the command. questions (`list[Question]`): What is answered.
        trees (`dict[str, dict]`): By draft. drafts (`dict[str, DraftModel]`): By name; each is told from others of its name
            by its weights. target (`PreTrainedModel`): The target. baselines (`Iterable[Baseline]`): Of `--baseline`.
    """
    return {
        "target": args.target,
        "target revision": getattr(target.config, "_commit_hash", None),
        "dtype": args.dtype,
        "attention": target.config._attn_implementation,
        "generation config": generation_facts(target),
        TREES: trees,
        "drafts": {
            name: {"path": draft.name_or_path, "revision": getattr(draft.config, "_commit_hash", None)}
            for name, draft in drafts.items()
        },
        "weights": {name: weights_hash(draft) for name, draft in drafts.items()},
        "baselines": [str(baseline) for baseline in baselines],
        "questions": len(questions),
        "prompts hash": prompts_hash(questions),
        "max new tokens": args.max_new_tokens,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "gto-hf": version("gto-hf"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine() -> str:
    """Accelerator or processor name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def identity(
    facts: dict[str, Any],
    temperatures: tuple[float, ...],
    systems: list[System],
    target: Any,
    tokenizer: Any,
    detail: Detail,
) -> dict[str, Any]:
    """
    What answers of an interrupted run must share with those to come: all that changes a text or a second.

    Args:
        facts (`dict`): From [`settings`]. temperatures (`tuple[float, ...]`), systems (`list[System]`), target, tokenizer,
            detail ([`Detail`]): As for [`measure`].
    """
    models = {s.name: s.kwargs["assistant_model"] for s in systems if s.kwargs.get("assistant_model") is not None}
    return {
        **{name: value for name, value in facts.items() if name not in WHEREABOUTS},
        "temperatures": list(temperatures),
        "systems": {system.name: describe(system) for system in systems},
        "weights": {"target": weights_hash(target), **{name: weights_hash(model) for name, model in models.items()}},
        # It lies beside the weights, is edited by hand, and makes the prompts.
        "chat template": hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()[:12],
        "details": detail.trees,
    }
