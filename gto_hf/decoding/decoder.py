# SPDX-License-Identifier: Apache-2.0
"""The route that patches nothing: `model.generate(custom_generate=TreeDecoder(draft))`. Level 4."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .loop import tree_decode
from .outputs import TreeDecodeOutput
from .request import as_draft


class TreeDecoder:
    """
    A draft as `custom_generate` callable, for those who want no hook in transformers.

    `generate` drops `streamer`, `tokenizer` and `assistant_model` for custom callables: give the streamer here (it gets
    prompt, tokens and end as from `generate`), and stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`.

    Args:
        draft ([`DraftModel`]): The draft, possibly inside a PEFT model.
        streamer (`BaseStreamer`, *optional*): As in `generate`.

    Example:

    ```python
    model.generate(**inputs, custom_generate=TreeDecoder(draft), max_new_tokens=64)
    ```
    """

    def __init__(self, draft: Any, streamer: Any = None) -> None:
        self.draft, self.streamer = as_draft(draft), streamer
        if self.draft is None:
            raise TypeError(f"`TreeDecoder` takes a draft, got {type(draft).__name__}.")

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> TreeDecodeOutput | torch.LongTensor:
        """Called by `generate`."""
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        return tree_decode(
            model,
            input_ids,
            draft=self.draft,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=self.streamer,
            **model_kwargs,
        )
