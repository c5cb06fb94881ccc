# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with chat tokens, and the chat templates of real models that TRL ships."""

from __future__ import annotations

from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SPECIAL = (
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>",
)  # fmt: skip
VOCAB = len(SPECIAL) + 256
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of several chat formats."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = template
    return tokenizer


def real_template(name: str) -> str:
    """The chat template of a real model, as TRL ships it."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def shown(tokenizer: PreTrainedTokenizerFast, ids: list[int], labels: list[int]) -> str:
    """The trained text, with `·` for every stretch that is not trained."""
    runs, trained = [], []
    for token, label in zip(ids, labels, strict=True):
        if label == -100:
            if trained or not runs:
                runs += [tokenizer.decode(trained), "·"] if trained else ["·"]
            trained = []
        else:
            assert label == token
            trained.append(token)
    return "".join([*runs, tokenizer.decode(trained)])


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns of user and assistant in alternation."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
