# SPDX-License-Identifier: Apache-2.0
"""Shapes of targets that are often trained for, so that a plan needs neither weights nor a network. Level 6."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen3Config


_LLAMA3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_LLAMA2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
# What the models' own config.json files say, as far as sizes and parameters depend on it.
KNOWN_TARGETS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, {**_LLAMA3_8B, "max_position_embeddings": 131072}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (LlamaConfig, {**_LLAMA3_8B, "max_position_embeddings": 131072}),
    "meta-llama/Meta-Llama-3-8B-Instruct": (LlamaConfig, {**_LLAMA3_8B, "max_position_embeddings": 8192}),
    "meta-llama/Llama-3.3-70B-Instruct": (
        LlamaConfig,
        {
            **_LLAMA3_8B,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
        },
    ),
    "meta-llama/Llama-2-7b-chat-hf": (LlamaConfig, _LLAMA2_7B),
    "lmsys/vicuna-13b-v1.3": (
        LlamaConfig,
        {
            **_LLAMA2_7B,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "max_position_embeddings": 2048,
        },
    ),
    "Qwen/Qwen3-8B": (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
}


def target_config(name: str) -> PreTrainedConfig:
    """
    Config of a target: a known one, or the `config.json` of a folder or of the Hub.

    Raises:
        ValueError: If it can be had from none of them.
    """
    if name in KNOWN_TARGETS:
        kind, fields = KNOWN_TARGETS[name]
        return kind(**fields)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No shapes of `{name}`: it is neither a folder with a config.json nor one of {', '.join(KNOWN_TARGETS)}, and "
            f"the Hub gave none ({str(error).partition(chr(10))[0]}). Put its config.json into a folder and name that."
        ) from error
