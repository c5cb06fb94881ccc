# SPDX-License-Identifier: Apache-2.0
"""Commands of a card that serve the draft elsewhere. Level 5, text only."""

from __future__ import annotations

import json
import shlex

from gto_hf.drafts import DraftConfig


# Draft types that the engines know -> method of vLLM, algorithm of SGLang.
_ENGINES = {"eagle3": ("eagle3", "EAGLE3"), "eagle": ("eagle", "EAGLE")}


def serving_commands(config: DraftConfig, target: str) -> dict[str, str] | None:
    """
    Shell commands by engine, for a draft that `gto-hf export` wrote to `draft-sglang` or `draft-vllm`; None for a type that
    no engine takes as an export.

    SGLang counts the root among its draft tokens and builds trees for a top-k above 1; vLLM, and TRL with it, draft chains.

    Args:
        config ([`DraftConfig`]): Of the draft. target (`str`): Hub id of its target.
    """
    if config.draft_type not in _ENGINES:
        return None
    (method, algorithm), tree = _ENGINES[config.draft_type], config.tree
    speculative = {"method": method, "model": "draft-vllm", "num_speculative_tokens": tree["depth"]}
    quoted, target = shlex.quote(json.dumps(speculative)), shlex.quote(target)
    return {
        "SGLang": f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path draft-sglang --speculative-num-steps {tree['depth']} \\\n"
        f"    --speculative-eagle-topk {tree['top_k']} --speculative-num-draft-tokens {tree['total_tokens'] + 1}",
        "vLLM": f"vllm serve {target} --speculative-config {quoted}",
        "TRL": f"trl vllm-serve --model {target} --speculative-config {quoted}",
    }
