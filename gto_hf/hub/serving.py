# SPDX-License-Identifier: Apache-2.0
"""Commands of a card that serve the draft elsewhere. Level 5, text only."""

from __future__ import annotations

import json
import shlex

from gto_hf.drafts import DraftConfig
from gto_hf.export import check_exportable


# Draft types that the engines know -> method of vLLM, algorithm of SGLang.
_METHODS = {"eagle3": ("eagle3", "EAGLE3"), "eagle": ("eagle", "EAGLE")}
_ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


def serving_commands(config: DraftConfig, name: str, target: str) -> dict[str, str] | None:
    """
    Shell commands by engine (`"sglang"`, `"vllm"`), export included, for the engines that can load the draft; None if none
    can.

    SGLang counts the root among its draft tokens and builds trees for a top-k above 1; vLLM, and TRL with it, draft chains.

    Args:
        config ([`DraftConfig`]): Of the draft. name (`str`): Its Hub id. target (`str`): Hub id of its target.
    """
    engines = [engine for engine in _ENGINES if _can_load(config, engine)]
    if not engines:
        return None
    (method, algorithm), tree = _METHODS[config.draft_type], config.tree
    speculative = {"method": method, "model": "draft-vllm", "num_speculative_tokens": tree["depth"]}
    quoted, name, target = shlex.quote(json.dumps(speculative)), shlex.quote(name), shlex.quote(target)
    served = {
        "sglang": f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path draft-sglang --speculative-num-steps {tree['depth']} \\\n"
        f"    --speculative-eagle-topk {tree['top_k']} --speculative-num-draft-tokens {tree['total_tokens'] + 1}",
        "vllm": f"vllm serve {target} --speculative-config {quoted}\n"
        f"trl vllm-serve --model {target} --speculative-config {quoted}",
    }
    # Without the target an export keeps the draft's own number of positions, and engines stop there.
    return {e: f"gto-hf export {name} --to {e} --target {target} --output draft-{e}\n{served[e]}" for e in engines}


def refusing_engines(config: DraftConfig) -> list[str]:
    """Names of the engines of which [`serving_commands`] has none."""
    return [name for engine, name in _ENGINES.items() if not _can_load(config, engine)]


def _can_load(config: DraftConfig, engine: str) -> bool:
    try:
        check_exportable(config, engine)
    except ValueError:
        return False
    return True
