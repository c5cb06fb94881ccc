# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets, drafts and tokenizers, built from configs; nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gto_hf import Eagle3Draft, TreeConfig


VOCAB = 64
EOS = 2
TREE = TreeConfig(depth=4, top_k=5, total_tokens=20)


def tiny_target(arch: str = "llama", seed: int = 0, *, vocab: int = VOCAB, sharpness: float = 8.0) -> PreTrainedModel:
    """A random 8-layer target in float32 whose logits are spread by `sharpness`."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if arch == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common))
    elif arch == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif arch == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab,
                n_embd=32,
                n_layer=8,
                n_head=4,
                n_positions=512,
                bos_token_id=1,
                eos_token_id=EOS,
                pad_token_id=0,
                tie_word_embeddings=False,
            )
        )
    else:
        raise ValueError(arch)
    model.get_output_embeddings().weight.data *= sharpness
    return model.eval()


def tiny_draft(target: PreTrainedModel, *, vocab: int = 48, tree: TreeConfig = TREE, seed: int = 1) -> Eagle3Draft:
    """A fresh draft that keeps `vocab` of the target's tokens."""
    torch.manual_seed(seed)
    counts = torch.arange(target.config.vocab_size, 0, -1)
    return Eagle3Draft.from_target(target, draft_vocab_size=vocab, token_counts=counts, tree=tree).eval()


def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words `t0 .. t63`, split at spaces."""
    words = {f"t{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0")


def written_rows(target: PreTrainedModel, count: int, length: int, *, prompt: int = 4, seed: int = 0) -> list[dict]:
    """Rows whose answers the target sampled; `labels` mask the prompt."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, target.config.vocab_size, (count, prompt))
    out = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_length=length, eos_token_id=None
    )
    return [{"input_ids": row.tolist(), "labels": [-100] * prompt + row[prompt:].tolist()} for row in out]
