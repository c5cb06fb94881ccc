# SPDX-License-Identifier: Apache-2.0
"""
From a target's last hidden state to its logits, a few positions at a time. Level 1.

A forward that returns logits of a whole batch returns `[B, T, V]` numbers, far more than anything else in a training step.
The hidden state is `V / H` times smaller, and the head can be applied where and when logits are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .describe import boundary_features, text_config, unwrap


class LogitHead:
    """
    A target's output embedding with what its family does behind it: a factor (Cohere, Granite) or a soft cap (Gemma).

    Make it with [`find_head`], which compares it with the target's own logits first.

    Args:
        target (`PreTrainedModel`): A causal LM with output embeddings.
    """

    def __init__(self, target: Any) -> None:
        config = text_config(target)
        self.module: nn.Module = unwrap(target).get_output_embeddings()
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.vocab_size: int = config.vocab_size
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(n, V)` of last hidden states `(n, H)`, in the target's dtype."""
        return self._finish(self.module(hidden))

    def rows(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits `(n, len(ids))` of some tokens only; cheap where the head is a plain matrix."""
        module = self.module
        weight = getattr(module, "weight", None)
        # Quantized, split and offloaded weights are read by their module alone, and hooks may change what it gives.
        plain = type(module) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point()
        hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        if not plain or hooked or weight.device != hidden.device or weight.shape[0] != self.vocab_size:
            return self(hidden).index_select(-1, ids)
        bias = None if module.bias is None else module.bias[ids]
        return self._finish(nn.functional.linear(hidden, weight[ids], bias))

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


# Per target: what the answer was found for, and the answer.
_FOUND: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], LogitHead | None]] = weakref.WeakKeyDictionary()


def find_head(target: nn.Module, probe: Callable[[], tuple[torch.Tensor | None, torch.Tensor]]) -> LogitHead | None:
    """
    The target's head, if it is known how logits follow from the last hidden state; compared once per target, and again when
    its head was replaced (an adapter put on it, resized embeddings) or its config says another factor or cap.

    Args:
        target (`PreTrainedModel`): A causal LM.
        probe (`Callable`): Called only if there is something to compare; last hidden states `(n, H)` after the final norm (or None) and the
            logits `(n, V)` that the target made of them.

    Returns:
        [`LogitHead`], or None for targets whose logits must be taken as they come.
    """
    now = _parts(target)
    known = _FOUND.get(target)
    if known is not None and known[0] == now:
        return known[1]
    hidden, logits = probe()
    if not bool(logits.isfinite().all()):
        return None  # a broken target proves nothing, and is found out elsewhere
    head = _compared(target, hidden, logits)
    _FOUND[target] = (now, head)
    return head


def _parts(target: nn.Module) -> tuple[Any, ...]:
    """All that a [`LogitHead`] takes from a target: as long as it is the same, so is the head."""
    config = text_config(target)
    fields = ("vocab_size", "logit_scale", "logits_scaling", "final_logit_softcapping")
    return (unwrap(target).get_output_embeddings(), *(getattr(config, field, None) for field in fields))


@torch.no_grad()
def target_head(target: Any, input_ids: torch.Tensor | None = None) -> LogitHead | None:
    """
    [`find_head`] with a forward over `input_ids` `(1, n)`, by default the first few ids; the forward is run once per target.
    """

    def probe() -> tuple[torch.Tensor | None, torch.Tensor]:
        config = text_config(target)
        final = config.num_hidden_layers  # its boundary is the last hidden state, after the norm
        ids = torch.arange(min(8, config.vocab_size))[None].to(target.device) if input_ids is None else input_ids
        output = target(input_ids=ids, use_cache=False, output_hidden_states=[final])
        states = output.hidden_states
        return (None if states is None else boundary_features(states, [final])[0]), output.logits[0]

    return find_head(target, probe)


@torch.no_grad()
def _compared(target: nn.Module, hidden: torch.Tensor | None, logits: torch.Tensor) -> LogitHead | None:
    if hidden is None or hidden.ndim != 2 or unwrap(target).get_output_embeddings() is None:
        return None
    head = LogitHead(target)
    try:
        made = head(hidden)
    except RuntimeError:  # a head of another width than the hidden state
        return None
    if made.shape != logits.shape:
        return None
    # The same product in another shape: a last bit may differ. A missing factor or cap is much farther off.
    eps = torch.finfo(logits.dtype).eps
    near = torch.allclose(
        made.float(), logits.float(), rtol=4 * eps, atol=4 * eps * float(logits.float().abs().mean())
    )
    return head if near and float(logits.float().std()) > 0 else None
