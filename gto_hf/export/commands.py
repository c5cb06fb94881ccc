# SPDX-License-Identifier: Apache-2.0
"""The exact commands that serve an exported draft. Level 4, text only."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from gto_hf.drafts import DraftConfig
from gto_hf.tree import TreeConfig


def speculative_config(engine: str, draft_type: str, folder: Path | str, tokens: int) -> str:
    """The JSON of vLLM's and TRL's `--speculative-config`: method, model and length of the chain."""
    method = "eagle" if draft_type == "eagle" else "eagle3"
    return json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": tokens})


def serve_commands(
    engine: str, config: DraftConfig, folder: Path, target: str, speculative_tokens: int
) -> dict[str, str]:
    """
    What to type, by name.

    Args:
        engine (`str`): The engine that `folder` was written for. config ([`DraftConfig`]): Of the draft.
        folder (`Path`): The export. target (`str`): Hub id or folder of the target.
        speculative_tokens (`int`): Length of a chain.
    """
    tree, kind = TreeConfig(**config.tree), config.draft_type
    if engine == "safeailab":
        return {"EAGLE's own code (tree)": _eagle_code(kind, folder, target, tree)}
    if engine == "sglang":
        found = {
            "SGLang, chain": _sglang(kind, folder, target, TreeConfig(speculative_tokens, 1, speculative_tokens)),
            "SGLang, tree": _sglang(kind, folder, target, tree),
        }
        if kind == "eagle3":
            found["llama.cpp"] = (
                f"python convert_hf_to_gguf.py {shlex.quote(str(folder))} --target-model-dir path/to/target "
                f"--outfile draft.gguf && llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3 "
                f"--spec-draft-n-max {speculative_tokens}"
            )
    else:
        spec = shlex.quote(speculative_config(engine, kind, folder, speculative_tokens))
        found = {
            "vLLM (chain)": f"vllm serve {shlex.quote(target)} --speculative-config {spec}",
            "TRL (chain)": f"trl vllm-serve --model {shlex.quote(target)} --speculative-config {spec}",
        }
        if engine == "speculators":
            found["vLLM, from the draft's own config (chain)"] = f"vllm serve {shlex.quote(str(folder))}"
    return found


def _sglang(kind: str, folder: Path, target: str, tree: TreeConfig) -> str:
    """SGLang counts the root among the draft tokens."""
    algorithm = "EAGLE" if kind == "eagle" else "EAGLE3"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(folder))} --speculative-num-steps {tree.depth} "
        f"--speculative-eagle-topk {tree.top_k} --speculative-num-draft-tokens {tree.total_tokens + 1}"
    )


def _eagle_code(kind: str, folder: Path, target: str, tree: TreeConfig) -> str:
    """Their `total_token` counts the root, and their `depth` leaves out the root's children."""
    eagle3 = ", use_eagle3=True" if kind == "eagle3" else ""
    return (
        f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={str(folder)!r}{eagle3}, "
        f"total_token={tree.total_tokens + 1}, depth={tree.depth - 1}, top_k={tree.top_k})"
    )
