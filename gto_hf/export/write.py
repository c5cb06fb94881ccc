# SPDX-License-Identifier: Apache-2.0
"""[`export`]: a draft as a folder that another engine loads. Level 4."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from gto_hf.drafts import DraftModel, check_values
from gto_hf.tree import TreeConfig

from .commands import serve_commands
from .configs import engine_config
from .dialects import Dialect
from .folder import check_free, whole_folder
from .limits import check_exportable
from .pair import Pair, named_source, read_draft, read_pair, target_embedding, target_facts
from .tensors import engine_tensors


FACTS = "gto_hf_export.json"


@dataclass
class Exported:
    """
    What [`export`] wrote.

    Attributes:
        folder (`Path`): Where. engine (`str`): For what.
        commands (`dict[str, str]`): How to serve it, by name. notes (`list[str]`): What to know about it.
    """

    folder: Path
    engine: str
    commands: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"wrote {self.folder} for {self.engine}"]
        lines += [f"\n{name}:\n  {command}" for name, command in self.commands.items()]
        return "\n".join([*lines, *(f"\nnote: {note}" for note in self.notes)])


def export(
    draft: DraftModel | str | PathLike,
    folder: str | PathLike,
    to: str,
    *,
    target: nn.Module | str | None = None,
    target_name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    with_embeddings: bool = False,
    speculative_tokens: int | None = None,
    overwrite: bool = False,
) -> Exported:
    """
    Write a draft in the layout of another engine.

    Everything that the engine cannot express is refused by name before anything is written, and the folder appears whole or
    not at all.

    Args:
        draft ([`DraftModel`] or `str`): The draft, or what [`AutoDraft`] reads.
        folder (`str`): Where to write.
        to (`str`): `"sglang"`, `"vllm"`, `"speculators"` or `"safeailab"` (EAGLE's and GRIFFIN's own layout).
        target (`PreTrainedModel` or `str`, *optional*): The target, for its embedding, its layers and its positions.
        target_name (`str`, *optional*): The target's Hub id, where `target` is a folder or was loaded from one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; saved beside the draft, where llama.cpp's converter
            looks for it.
        dtype (`torch.dtype`, *optional*): Of the written weights; defaults to the draft's.
        with_embeddings (`bool`, *optional*, defaults to `False`): Store a copy of the target's embedding where the engine
            could share the target's.
        speculative_tokens (`int`, *optional*): Length of a chain; defaults to the depth of the draft's tree.
        overwrite (`bool`, *optional*, defaults to `False`): Replace what is in `folder`.

    Returns:
        [`Exported`]: `str()` of it says how to serve the folder.

    Raises:
        ValueError: If the engine cannot read this draft, something is missing to write it, or the folder is taken.
        DraftCheckpointError: If the draft's weights are no numbers or its vocabulary map is none.
    """
    folder = Path(folder)
    if not isinstance(draft, DraftModel):
        if isinstance(draft, nn.Module):
            raise TypeError(
                f"`draft` is a {type(draft).__name__}, not a draft. Merge an adapter first: `draft.merge_and_unload()`, or "
                "`AutoDraft.from_pretrained(adapter)`."
            )
        check_free(folder, overwrite=overwrite, sources=(draft, named_source(target)))
        facts = target_facts(target) if isinstance(target, str) else None
        draft = read_draft(draft, target if isinstance(target, nn.Module) else None, facts)
    check_free(folder, overwrite=overwrite, sources=(draft.config.name_or_path, named_source(target)))
    pair = read_pair(draft, target, target_name)
    dialect = check_exportable(pair.config, to)
    check_values(draft.config.name_or_path or type(draft).__name__, draft)
    tokens = TreeConfig(**pair.config.tree).depth if speculative_tokens is None else speculative_tokens
    if tokens < 1:
        raise ValueError(f"`speculative_tokens={tokens}` must be at least 1.")
    if to == "speculators" and pair.name is None:
        raise ValueError(
            "speculators' config names its target, and the Hub id of this one is unknown. Pass `target_name=` "
            "(`--target-name owner/name`)."
        )
    if to == "sglang" and getattr(pair.config, "norm_output", False):
        # Under the old name of the layer the flag means something else to readers of SpecForge's files.
        dialect = replace(dialect, layer="layers.0.")
    embedding = _embedding(draft, pair, dialect, target, with_embeddings)
    tensors = engine_tensors(draft, dialect, embedding=embedding, dtype=dtype)
    config = engine_config(
        pair.config,
        dialect,
        max_positions=pair.max_positions,
        dtype=str(tensors["fc.weight" if "fc.weight" in tensors else "fc.fc.weight"].dtype).removeprefix("torch."),
        verifier=pair.name,
        verifier_architectures=pair.architectures,
        speculative_tokens=tokens,
    )
    with whole_folder(folder) as inside:
        (inside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (inside / FACTS).write_text(json.dumps(_facts(pair, to), indent=2) + "\n", encoding="utf-8")
        if dialect.file.endswith(".bin"):
            torch.save(tensors, inside / dialect.file)
        else:
            save_file(tensors, inside / dialect.file, metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(inside)
    commands = serve_commands(to, pair.config, folder, pair.shown, tokens)
    return Exported(folder, to, commands, _notes(pair, dialect, tokenizer is not None))


def _embedding(
    draft: DraftModel, pair: Pair, dialect: Dialect, target: Any, with_embeddings: bool
) -> torch.Tensor | None:
    """What to store as token embedding; None where the engine takes the target's."""
    if pair.config.own_embeddings:
        return draft.embed_tokens.weight
    if with_embeddings and dialect.embedding in ("target", "other width"):
        raise ValueError(
            f"{dialect.engine} always takes the target's embedding, so storing a copy (`with_embeddings`) has no use there."
        )
    return target_embedding(draft, target) if with_embeddings or dialect.embedding == "stored" else None


def _facts(pair: Pair, engine: str) -> dict[str, Any]:
    """What the engine's own config has no field for; nothing in it names this machine."""
    config = pair.config
    return {
        "engine": engine,
        "gto_hf": version("gto-hf"),
        "draft_type": config.draft_type,
        "target": pair.name,
        "feature_layers_as_hidden_states_indices": list(config.feature_layers),
        "trained_length": config.trained_length,
        "tree": config.tree,
    }


def _notes(pair: Pair, dialect: Dialect, tokenizer: bool) -> list[str]:
    config, layers, notes = pair.config, list(pair.config.feature_layers), []
    depth = (config.target or {}).get("num_hidden_layers")
    usual = depth is not None and layers == [2, depth // 2, depth - 3]
    if dialect.engine == "sglang" and config.draft_type == "eagle3" and not usual:
        notes.append(
            f"SGLang adds 1 to the layer ids {[k - 1 for k in layers]} for most targets; for some it does so only if the "
            "first id is 1. If the acceptance is near zero, try the ids plus 1 in config.json."
        )
    if dialect.engine == "vllm" and config.draft_type == "eagle3" and len(layers) != 3:
        notes.append(
            f"{len(layers)} feature layers need a vLLM that reads `num_aux_hidden_states`; older ones build for 3."
        )
    if config.draft_type == "eagle3" and dialect.engine == "sglang":
        if not usual:
            notes.append(
                "llama.cpp takes layers 2, n // 2 and n - 3 whatever the config says, so this draft is not for it."
            )
        if not tokenizer:
            notes.append("No tokenizer was given (`--target`); llama.cpp's converter wants one beside the draft.")
    if config.max_position_embeddings == pair.max_positions and (config.trained_length or 0) == pair.max_positions:
        notes.append(
            f"`max_position_embeddings` is {pair.max_positions}, the length that the draft was trained on. Engines stop "
            "there or refuse a longer target: pass the target (`--target`) to write its length."
        )
    if config.tree.get("auto"):
        notes.append("The draft's tree is automatic; engines have fixed trees, and its limits were taken.")
    return notes
