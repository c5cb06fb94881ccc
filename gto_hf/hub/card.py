# SPDX-License-Identifier: Apache-2.0
"""Model card of a draft, from what its config says; nothing is typed by hand, nothing unmeasured is claimed."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from gto_hf.drafts import DraftConfig
from gto_hf.target import is_hub_id


def draft_card(
    config: DraftConfig,
    *,
    name: str,
    dataset_name: str | None = None,
    tags: list[str] | None = None,
    adapter: bool = False,
    paper: dict[str, str] | None = None,
) -> ModelCard:
    """
    Card of a draft.

    Args:
        config ([`DraftConfig`]): Of the draft.
        name (`str`): Hub id, or folder name if it is nowhere else.
        dataset_name (`str`, *optional*): Hub id of the training data.
        tags (`list[str]`, *optional*): Hub tags.
        adapter (`bool`, *optional*, defaults to `False`): Whether the folder holds a LoRA adapter.
        paper (`dict[str, str]`, *optional*): `title`, `id` and `citation` of the training method.
    """
    target = config.target or {}
    data = ModelCardData(
        library_name="peft" if adapter else "gto-hf",
        base_model=target.get("name_or_path") if is_hub_id(target.get("name_or_path")) else None,
        datasets=dataset_name,
        tags=list(dict.fromkeys(tags or [])),
    )
    path = config._name_or_path
    return ModelCard.from_template(
        data,
        template_path=str(files("gto_hf") / "assets" / "draft_card.md"),
        name=name,
        target=target.get("name_or_path")
        or f"a {target.get('num_hidden_layers')}-layer {target.get('model_type')} model",
        target_id=data.base_model or "path/to/that/model",
        draft_type=config.draft_type,
        facts=_facts(config),
        base_draft=path if adapter and path and not path.startswith((".", "/")) else None,
        adapter=adapter,
        paper=paper,
    )


def _facts(config: DraftConfig) -> list[tuple[str, Any]]:
    """Rows of the card's table."""
    tree = config.tree
    return [
        ("Draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("Feature layers (`hidden_states` indices)", ", ".join(map(str, config.feature_layers))),
        ("Longest training row", "unknown" if config.trained_length is None else f"{config.trained_length} tokens"),
        (
            "Decoding tree",
            f"depth {tree['depth']}, top-k {tree['top_k']}, {tree['total_tokens']} nodes (root excluded)",
        ),
        ("Target quantization", (config.target or {}).get("quantization") or "none"),
    ]
