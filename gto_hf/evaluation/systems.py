# SPDX-License-Identifier: Apache-2.0
"""The systems of one `gto-hf eval`: drafts, trees, and what transformers itself offers. Level 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from gto_hf.target import text_config
from gto_hf.tree import TreeConfig

from .bench import System
from .runs import PLAIN


LOOKUP_TOKENS = 10  # as in transformers' own documentation of prompt lookup
_DFLASH_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")
_KINDS = "plain, prompt-lookup, prompt-lookup:TOKENS, assisted:MODEL, dflash:DRAFT"


@dataclass(frozen=True)
class Baseline:
    """One entry of `--baseline`: `kind`, and what stands behind the colon."""

    kind: str
    value: str = ""

    @property
    def name(self) -> str:
        """As in the tables."""
        label = {"plain": PLAIN, "prompt-lookup": "prompt lookup", "assisted": "stock assisted", "dflash": "DFlash"}
        return f"{label[self.kind]} {self.value.rstrip('/').rpartition('/')[2]}".strip()

    def __str__(self) -> str:
        """As it was asked for, with the whole name of its model."""
        return f"{self.kind}:{self.value}".rstrip(":")


def parse_baselines(text: str) -> list[Baseline]:
    """
    `"plain,prompt-lookup,assisted:org/small"` to its entries; plain generation is always the first one.

    Raises:
        ValueError: Names the entry that is none, or stands twice.
    """
    found = [Baseline("plain")]
    for entry in (part.strip() for part in text.split(",")):
        kind, _, value = entry.partition(":")
        if entry in ("", "plain"):
            continue
        lookup = kind == "prompt-lookup" and (":" not in entry or (value.isdigit() and int(value) > 0))
        if not lookup and not (kind in ("assisted", "dflash") and value):
            raise ValueError(f"`--baseline {entry}` is none of: {_KINDS}.")
        if Baseline(kind, value) in found:
            raise ValueError(f"`--baseline` names `{entry}` twice.")
        found.append(Baseline(kind, value))
    return found


def baseline_system(baseline: Baseline, target: Any, tokenizer: Any) -> System:
    """
    Load what a baseline needs.

    Raises:
        ValueError: If stock transformers cannot decode this target so; says what is missing.
    """
    if baseline.kind == "plain":
        return System(PLAIN)
    if baseline.kind == "prompt-lookup":
        return System(baseline.name, {"prompt_lookup_num_tokens": int(baseline.value or LOOKUP_TOKENS)})
    if baseline.kind == "dflash":
        draft = load_dflash(baseline.value, target)
        return System(baseline.name, {"assistant_model": draft, "speculation_type": "dflash"})
    assistant = AutoModelForCausalLM.from_pretrained(baseline.value, dtype=target.dtype).to(target.device).eval()
    kwargs = {"assistant_model": assistant}
    if text_config(assistant).vocab_size != text_config(target).vocab_size:
        other = AutoTokenizer.from_pretrained(baseline.value)
        kwargs |= {"tokenizer": tokenizer, "assistant_tokenizer": other}  # stock translates between the two
    return System(baseline.name, kwargs)


def load_dflash(path: str, target: Any) -> Any:
    """
    A DFlash assistant as stock transformers decodes with it (`speculation_type="dflash"`).

    Args:
        path (`str`): Hub id or folder. target (`PreTrainedModel`): It borrows the embedding and the head.

    Raises:
        ValueError: Says which model type, field or size stock transformers lacks.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except ValueError as error:
        raise ValueError(
            f"`dflash:{path}`: transformers {transformers.__version__} has no class for this checkpoint ({_first_line(error)}). It "
            "decodes with DFlash assistants that `AutoModel` knows (`muse_glimmer_assistant` today); classes that come "
            "with a checkpoint (`trust_remote_code`) are not run here. Register yours with `AutoConfig` and `AutoModel`, "
            "or convert the checkpoint to that layout."
        ) from error
    inside = getattr(config, "dflash_config", None) or {}
    missing = [name for name in _DFLASH_FIELDS if getattr(config, name, None) is None]
    if missing:
        nested = [name for name in missing if name in inside]
        hint = f" ({', '.join(nested)} stand in `dflash_config`: move them up)" if nested else ""
        raise ValueError(
            f"`dflash:{path}`: the config of a DFlash assistant needs {', '.join(_DFLASH_FIELDS)}; of these "
            f"{', '.join(missing)} are missing{hint}. Is it a DFlash draft? Its model type is `{config.model_type}`."
        )
    sizes = text_config(target)
    if config.hidden_size != sizes.hidden_size or max(config.target_layer_ids) >= sizes.num_hidden_layers:
        raise ValueError(
            f"`dflash:{path}` is made for a target of width {config.hidden_size} with more than "
            f"{max(config.target_layer_ids)} layers; this one has width {sizes.hidden_size} and "
            f"{sizes.num_hidden_layers} layers. Give the draft of this target."
        )
    return AutoModel.from_pretrained(path, dtype=target.dtype).to(target.device).eval()


def draft_systems(drafts: Mapping[str, Any], trees: list[TreeConfig]) -> list[System]:
    """Every draft with its own tree, then with each of `trees`."""
    systems = [System(name, {"assistant_model": draft}) for name, draft in drafts.items()]
    for name, draft in drafts.items():
        for tree in trees:
            label = f"{name} @ {tree.depth}/{tree.top_k}/{tree.total_tokens}"
            systems.append(System(label, {"assistant_model": draft}, tree))
    return systems


def describe(system: System) -> dict[str, Any]:
    """What a system is, in JSON values, for the settings of a run."""
    draft = system.kwargs.get("assistant_model")
    tree = system.tree if system.tree is not None else getattr(draft, "tree", None)
    said = {key: value for key, value in system.kwargs.items() if isinstance(value, (int, float, str))}
    return {**said, "model": None if draft is None else type(draft).__name__, "tree": tree and tree.to_dict()}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
