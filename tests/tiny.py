# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets, drafts and tokenizers, built from configs; nothing is downloaded."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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

from gto_hf import DraftModel, Eagle3Draft, GTOConfig, GTOTrainer, TreeConfig


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


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per id: 3 is `!`, 4 is `"`, and so on."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(ord("!") + i - 3): i for i in range(3, VOCAB)}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def written_rows(target: PreTrainedModel, count: int, length: int, *, prompt: int = 4, seed: int = 0) -> list[dict]:
    """Rows whose answers the target sampled; `labels` mask the prompt."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, target.config.vocab_size, (count, prompt))
    out = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_length=length, eos_token_id=None
    )
    return [{"input_ids": row.tolist(), "labels": [-100] * prompt + row[prompt:].tolist()} for row in out]


def memorised_rows(target: PreTrainedModel, count: int = 6, length: int = 60) -> tuple[list[dict], torch.Tensor]:
    """The target's own greedy texts after `count` prompts, as rows, and the prompts `(count, 6)`."""
    torch.manual_seed(5)
    prompts = torch.randint(3, target.config.vocab_size, (count, 6))
    out = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_length=length, eos_token_id=None
    )
    return [{"input_ids": r.tolist(), "labels": [-100] * 6 + r[6:].tolist()} for r in out], prompts


def train_tiny(draft: DraftModel, target: PreTrainedModel, rows: list[dict], *, steps: int = 250, **kwargs) -> None:
    """Phase I on a few rows until the draft knows them."""
    with tempfile.TemporaryDirectory() as folder:
        args = GTOConfig(
            folder,
            max_steps=steps,
            learning_rate=3e-3,
            per_device_train_batch_size=len(rows),
            gto_weight=0.0,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1000,
            report=False,
            **kwargs,
        )
        dataset = Dataset.from_list(rows)
        trainer = GTOTrainer(draft, target, args, train_dataset=dataset, processing_class=tiny_tokenizer())
        trainer.train()
    draft.eval()
