# SPDX-License-Identifier: Apache-2.0
"""
Model card of a draft: from its config, from what its training left on disk, and from what was measured. Nothing is typed by
hand, nothing unmeasured is claimed. Level 5.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from gto_hf.drafts import DraftConfig, DraftModel
from gto_hf.target import is_hub_id
from gto_hf.tree import TreeConfig

from .clean import clean_folder, is_path
from .results import Measured
from .serving import refusing_engines, serving_commands


MARK = "<!-- written by gto-hf -->"  # a card that ends with it may be written anew
SUMMARY_FILE = "training_summary.json"  # what the trainer leaves beside a draft about its training
_TAGS = ["gto", "speculative-decoding"]
_TRANSFORMERS_DEFAULT = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."


def draft_card(
    config: DraftConfig,
    *,
    name: str,
    dataset_name: str | None = None,
    tags: list[str] | None = None,
    adapter: bool = False,
    paper: dict[str, str] | None = None,
    license: str | None = None,
    training: dict[str, Any] | None = None,
    results: list[Measured] | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """
    Card of a draft.

    Args:
        config ([`DraftConfig`]): Of the draft.
        name (`str`): Hub id, or folder name if it is nowhere else.
        dataset_name (`str`, *optional*): Hub id of the training data; the name of a file is not shown.
        tags (`list[str]`, *optional*): Hub tags; that of the draft type is added.
        adapter (`bool`, *optional*, defaults to `False`): Whether the folder holds a LoRA adapter.
        paper (`dict[str, str]`, *optional*): `title`, `id` and `citation` of the training method.
        license (`str`, *optional*): Hub identifier of the draft's licence.
        training (`dict`, *optional*): What `training_summary.json` beside the draft says.
        results (`list[Measured]`, *optional*): From [`read_results`]; without them the card says that nothing was measured.
        base_model (`str`, *optional*): Hub id of the target, where the config only describes it.
    """
    training, results = training or {}, results or []
    name = Path(name).name if is_path(name) else name
    target = config.target or {}
    target_id = base_model or (target.get("name_or_path") if is_hub_id(target.get("name_or_path")) else None)
    base = _base_draft(config, adapter, training)
    dataset_name = dataset_name or training.get("dataset")
    data = ModelCardData(
        library_name="peft" if adapter else "gto-hf",
        license=license,
        base_model=([base, target_id] if base and target_id else base or target_id),
        base_model_relation="adapter" if adapter and base else None,
        datasets=dataset_name if is_hub_id(dataset_name) and not Path(dataset_name).exists() else None,
        tags=list(dict.fromkeys([*(tags or _TAGS), *_type_tags(config)])),
        model_name=name if results else None,
        eval_results=_eval_results(results) or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(files("gto_hf") / "assets" / "draft_card.md"),
        name=name,
        target=target.get("name_or_path")
        or f"a {target.get('num_hidden_layers')}-layer {target.get('model_type')} model",
        target_id=target_id or "path/to/that/model",
        draft_type=config.draft_type,
        facts=_facts(config),
        base_draft=base if adapter else None,
        adapter=adapter,
        paper=paper or training.get("paper"),
        license=license,
        results=results,
        depths=max((len(each.by_depth) for each in results), default=0),
        measured_with=_settings(results),
        training=_training_rows(training, base),
        evaluated=training.get("evaluation"),
        serving=None if adapter else serving_commands(config, name, target_id or "path/to/that/model"),
        refusing=refusing_engines(config),
        mark=MARK,
    )


def prepare_push(draft: DraftModel, name: str, folder: Path) -> None:
    """
    Make a folder publishable that is about to be pushed: no paths in its configs, and a card in place of an empty one or of
    an earlier one of ours.

    A card that somebody wrote stays. Figures of an earlier card do not: the weights are not those that were measured.

    Args:
        draft ([`DraftModel`]): The draft. name (`str`): Hub id. folder (`Path`): Holds `README.md` of the repository.
    """
    clean_folder(folder)
    path = folder / "README.md"
    old = ModelCard.load(path, ignore_metadata_errors=True) if path.exists() else None
    if old is not None and MARK not in old.text and _TRANSFORMERS_DEFAULT not in old.text:
        return
    known = old.data if old is not None else ModelCardData()
    datasets = known.datasets
    draft_card(
        draft.config,
        name=name,
        license=known.license,
        dataset_name=datasets[0] if isinstance(datasets, list) and datasets else datasets or None,
        tags=[*_TAGS, *(known.tags or [])],
    ).save(path)


def _type_tags(config: DraftConfig) -> list[str]:
    return {"eagle3": ["eagle-3"], "causal_lm": ["draft-model"]}.get(config.draft_type, [config.draft_type])


def _base_draft(config: DraftConfig, adapter: bool, training: dict[str, Any]) -> str | None:
    """Hub id of the draft that this one was trained from."""
    found = config._name_or_path if adapter else training.get("base_draft")
    return found if is_hub_id(found) and not Path(found).exists() else None


def _facts(config: DraftConfig) -> list[tuple[str, Any]]:
    """Rows of the card's first table."""
    tree, target = config.tree, config.target or {}
    reads = ", ".join(map(str, config.feature_layers)) or "none"
    auto = ", chosen in every round up to that" if tree.get("auto") else ""
    facts = [
        ("Draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("Feature layers (`hidden_states` indices)", reads),
        ("Longest training row", "unknown" if config.trained_length is None else f"{config.trained_length} tokens"),
        (
            "Decoding tree",
            f"depth {tree['depth']}, top-k {tree['top_k']}, {tree['total_tokens']} nodes (root excluded){auto}",
        ),
        ("Target quantization", target.get("quantization") or "none"),
    ]
    return [*facts, *([("Target revision", f"`{target['revision']}`")] if target.get("revision") else [])]


def _settings(results: list[Measured]) -> list[tuple[str, Any]]:
    """What the figures must be read with; values that are paths are left out."""
    wanted = (
        "dtype",
        "attention",
        "questions",
        "prompts hash",
        "max new tokens",
        "machine",
        "threads",
        "date",
        "gto-hf",
    )
    found: dict[str, list[str]] = {}
    for each in results:
        for key in (*wanted, "torch", "transformers"):
            value = each.settings.get(key)
            text = None if value is None or is_path(str(value)) else str(value)
            if text is not None and text not in found.setdefault(key, []):
                found[key].append(text)
    return [(key, "; ".join(values)) for key, values in found.items() if values]


def _training_rows(training: dict[str, Any], base: str | None) -> list[tuple[str, Any]]:
    """Rows of the table on training, from `training_summary.json`; what it does not say is not shown."""
    said = [("data", training["data"])] if training.get("data") else []
    counts = ("rows", "steps", "weights of step", "epochs", "tokens read (prompts included)", "trained tokens")
    numbers = [(key, f"{training[key]:,}") for key in counts if training.get(key) is not None]
    parts = ("objective", "settings", "training tree", "adapter", "hardware", "versions")
    texts = [(key, ", ".join(f"{k} {v}" for k, v in training[key].items())) for key in parts if training.get(key)]
    start = [("started from", f"`{base}`")] if base else []
    return [*start, *said, *numbers, *texts]


def _eval_results(results: list[Measured]) -> list[EvalResult]:
    """`model-index` entries: τ (macro) and SR of every tree and temperature."""
    found = []
    for each in results:
        hashed = each.settings.get("prompts hash", "unknown")
        tree = TreeConfig(**each.tree)
        for metric, label, value in (
            ("acceptance_length", "τ (macro, bonus token counted)", each.tau_macro),
            ("speedup", "SR (over plain generate)", each.speedup),
        ):
            found.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Speculative decoding",
                    dataset_type="gto-hf-questions",
                    dataset_name=f"{each.prompts} prompts, hash {hashed}",
                    dataset_config=str(hashed),  # figures of other prompts are results of their own
                    metric_type=metric,
                    metric_name=f"{label}, {each.kind} {each.shape}, T={each.temperature:g}",
                    metric_value=round(value, 3),
                    metric_args={"temperature": each.temperature, "tree": tree.to_dict()},
                )
            )
    return found
