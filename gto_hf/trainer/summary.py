# SPDX-License-Identifier: Apache-2.0
"""What a run was, in a few values: `training_summary.json` beside the draft, from which its card is written. Level 6."""

from __future__ import annotations

import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from gto_hf.decoding import as_draft
from gto_hf.evaluation.facts import machine
from gto_hf.hub import publishable
from gto_hf.lora import is_peft
from gto_hf.target import is_hub_id

from .report import merged_rows


_MEASURED = re.compile(r"eval(_.+)?_(tau(_chain)?|accepted/depth_\d+)")
_SETTINGS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "max_grad_norm",
    "max_length",
    "seed",
    "train_on",
)
_TREE_TERM = (
    "gto_weight",
    "gto_objective",
    "num_groups",
    "group_size",
    "gto_aggregation",
    "gto_epsilon",
    "gto_debias",
)
_PACKAGES = ("gto-hf", "torch", "transformers", "trl", "peft", "datasets")


def training_summary(trainer: Trainer, dataset: str | None) -> dict[str, Any]:
    """
    Data, tokens, objective, settings, last evaluation, hardware and versions of a run so far, ready for JSON. It holds no
    path and no token.

    Args:
        trainer (`GTOTrainer`): The trainer.
        dataset (`str`, *optional*): Hub id of the training data; the name of a file is left out.
    """
    args, state, rows = trainer.args, trainer.state, merged_rows(trainer.state.log_history)
    data = trainer._rows.reports.get("train")
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    objective = {
        "token_objective": args.token_objective,
        "ttt_steps": trainer.ttt_steps,
        "ttt_decay": args.ttt_decay,
        "ttt_weights": args.ttt_weights,
    }
    term = {name: getattr(args, name) for name in _TREE_TERM} if args.gto_weight > 0 else {"gto_weight": 0}
    base = as_draft(trainer.accelerator.unwrap_model(trainer.model)).name_or_path
    best = state.best_global_step if args.load_best_model_at_end and not trainer.is_in_train else None
    count = torch.accelerator.device_count() if torch.accelerator.is_available() and not args.use_cpu else 0
    summary = {
        "base_draft": _on_hub(base),
        "dataset": _on_hub(dataset),
        "rows": None if data is None or data.sample else data.kept,
        "steps": state.global_step,
        "weights of step": best,
        "epochs": None if state.epoch is None else round(state.epoch, 3),
        "tokens read (prompts included)": trainer._total_train_tokens,
        "trained tokens": _trained_tokens(trainer, rows),
        "objective": objective | term,
        "settings": {
            "batch": batch,
            "precision": precision,
            **{name: _plain(getattr(args, name)) for name in _SETTINGS},
        },
        "training tree": trainer.tree.to_dict(),
        "adapter": _adapter(trainer.accelerator.unwrap_model(trainer.model)),
        "evaluation": _evaluation(args, [row for row in rows if best in (None, row["step"])]),
        "hardware": {
            "processes": args.world_size,
            "device": machine(),
            **({"devices per machine": count} if count else {}),
        },
        "versions": {name: version(name) for name in _PACKAGES},
    }
    return publishable(summary)


def _trained_tokens(trainer: Trainer, rows: list[dict[str, float]]) -> int | None:
    """Over the whole run; None where part of it is known to other ranks only, until they log it together."""
    waiting = trainer._sums["train"].waiting("trained_tokens")
    if waiting and trainer.args.world_size > 1:
        return None
    return int(sum(row.get("trained_tokens", 0) for row in rows) + waiting)


def _on_hub(name: str | None) -> str | None:
    return name if is_hub_id(name) and not Path(name).exists() else None


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _adapter(model: Any) -> dict[str, Any] | None:
    """Kind, rank and scale of an adapter; None if the whole draft is trained."""
    if not is_peft(model):
        return None
    config = model.active_peft_config
    shown = {name: getattr(config, name) for name in ("r", "lora_alpha") if hasattr(config, name)}
    return {"type": _plain(config.peft_type), **shown}


def _evaluation(args: Any, rows: list[dict[str, float]]) -> dict[str, Any] | None:
    """The last acceptance length that an evaluation measured; None if none did."""
    for row in reversed(rows):
        metrics = {k: v for k, v in row.items() if _MEASURED.fullmatch(k) and math.isfinite(v)}
        if metrics:
            how = {"new_tokens": args.eval_max_new_tokens, "temperature": args.eval_temperature}
            return {"step": int(row["step"]), "prompts": args.eval_prompts, **how, "metrics": metrics}
    return None
