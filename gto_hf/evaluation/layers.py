# SPDX-License-Identifier: Apache-2.0
"""Whether a draft reads the layers that it was trained on: its first guesses with their neighbours' features. Level 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gto_hf.drafts import DraftModel
from gto_hf.target import boundary_features


# A neighbour is called better if it agrees at this many more positions of 100, and beyond this many standard errors.
CLEARLY = 0.1
ERRORS = 3.0


@dataclass(frozen=True)
class LayerAgreement:
    """
    How often the draft's first token is the target's own, by shift of all feature layers.

    Attributes:
        layers (`list[int]`): The draft's `feature_layers`. positions (`int`): Compared.
        agreeing (`dict[int, int]`): Positions that agree, for shift -1, 0 and 1 where those layers exist.
    """

    layers: list[int]
    positions: int
    agreeing: dict[int, int]

    def rate(self, shift: int = 0) -> float:
        """Share of positions that agree with the layers moved by `shift`."""
        return self.agreeing[shift] / max(self.positions, 1)

    @property
    def better(self) -> int | None:
        """The shift that is clearly better than none; None if there is no such."""
        best = max(self.agreeing, key=self.rate)
        own, other, n = self.rate(), self.rate(best), max(self.positions, 1)
        error = ((own * (1 - own) + other * (1 - other)) / n) ** 0.5
        return best if best != 0 and other - own > max(CLEARLY, ERRORS * error) else None

    def __str__(self) -> str:
        names = {-1: "one layer lower", 0: "as configured", 1: "one layer higher"}
        rates = ", ".join(f"{names[s]} {self.rate(s):.0%}" for s in sorted(self.agreeing))
        text = f"first drafted token is the target's, by feature layers, at {self.positions} positions: {rates}"
        if self.better is None:
            return text
        other = [k + self.better for k in self.layers]
        return (
            f"{text}. With {other} instead of {self.layers} it is clearly better: the layers are probably numbered in "
            f"another way. Load the checkpoint with `feature_layers={other}`, or correct them in its config"
        )


@torch.inference_mode()
def layer_agreement(
    model: nn.Module, draft: DraftModel, prompts: Sequence[Sequence[int] | torch.Tensor], *, new_tokens: int = 32
) -> LayerAgreement:
    """
    Compare first guesses with features of the configured layers and of their neighbours.

    Args:
        model (`PreTrainedModel`): The target. draft ([`DraftModel`]): One that reads features, attached or not.
        prompts (`Sequence`): Token ids, one sequence per prompt; the target's own greedy continuation is read too.
        new_tokens (`int`, *optional*, defaults to `32`): Its length.
    """
    draft.attach(model)
    own, positions, agreeing = list(draft.config.feature_layers), 0, {}
    for prompt in prompts:
        ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device).reshape(1, -1)
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, num_beams=1
        )
        output = model(ids, output_hidden_states=True, use_cache=False)
        best = output.logits[0, 1:].argmax(-1).to(draft.device)
        positions += len(best)
        for shift in (-1, 0, 1):
            layers = [k + shift for k in own]
            if layers[0] < 0 or layers[-1] >= len(output.hidden_states):
                continue
            features = boundary_features(output.hidden_states, layers)[:, :-1]
            guesses = _first_guesses(draft, ids[:, 1:].to(draft.device), features)
            agreeing[shift] = agreeing.get(shift, 0) + int((guesses == best).sum())
    return LayerAgreement(own, positions, agreeing)


def _first_guesses(draft: DraftModel, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The draft's most likely token after every pair, `(F,)` target ids; `tokens` `(1, F)`, `features` `(1, F, k * Ht)`."""
    length = tokens.shape[1]
    mask = torch.ones(1, length, length, dtype=torch.bool, device=draft.device).tril()
    places = torch.arange(length, device=draft.device)[None]
    output = draft(tokens, draft.fuse(features), places, None, mask)
    return draft.to_target_ids(draft.head(output.features)[0].argmax(-1))
