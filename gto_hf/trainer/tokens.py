# SPDX-License-Identifier: Apache-2.0
"""The token loss that a configuration asks for. Level 6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gto_hf.drafts import DRAFTS, DraftModel
from gto_hf.gto import (
    FEATURE_OBJECTIVES,
    FeatureLoss,
    Sequences,
    TargetReading,
    TokenLoss,
    dpace_weights,
    feature_token_loss,
    noisy,
    token_loss,
)
from gto_hf.tree import TreeConfig

from .gto_config import GTOConfig


class TokenTerm:
    """
    Chooses the loss of `args.token_objective` and its unrolled steps.

    Attributes:
        recipe ([`FeatureLoss`], *optional*): Of the losses on features; None for those on distributions alone.
        steps (`int`): Unrolled steps.
        decay (`float`): Step `k` weighs `decay**k`.

    Raises:
        ValueError: If the loss needs features that the draft does not predict, or noise would reach the trees.
    """

    def __init__(self, args: GTOConfig, draft: DraftModel, tree: TreeConfig) -> None:
        self.args = args
        self.recipe: FeatureLoss | None = None
        if args.token_objective in FEATURE_OBJECTIVES:
            self.recipe = _recipe(args, draft)
        # A draft that feeds on its own outputs is taught several steps; a language model reads text either way.
        default = tree.depth if draft.reads_features else 1
        self.steps = args.ttt_steps or (default if self.recipe is None else self.recipe.steps)
        self.decay = args.ttt_decay or (0.8 if self.recipe is None else 1.0)
        if args.ttt_weights != "decay" and self.steps < 2:
            raise ValueError(
                f"`ttt_weights={args.ttt_weights!r}` divides a root's weight among unrolled steps, but there is one. Raise `ttt_steps`, "
                "or leave `ttt_weights` at `decay`."
            )

    def read(self, sequences: Sequences, *, training: bool) -> Sequences:
        """What the draft reads of a batch: in training, features with the recipe's noise."""
        return noisy(sequences, self.recipe.noise) if training and self.recipe is not None else sequences

    def loss(
        self,
        draft: DraftModel,
        reading: TargetReading,
        roots: torch.Tensor,
        supervised: torch.Tensor,
        largest: Callable[[int], int],
        *,
        training: bool,
    ) -> Callable[[list[torch.Tensor]], TokenLoss]:
        """
        The loss of a batch as a function of the draft's outputs; arguments as of [`token_loss`].

        Weights that grow with the draft's confidence are for gradients only: in evaluation they would make a better draft's
        loss larger.
        """
        known = {
            "readout": reading.readout,
            "roots": roots,
            "supervised": supervised,
            "decay": self.decay,
            "skip_unsayable": self.args.skip_unsayable,
            "largest": largest,
        }
        if self.recipe is not None:
            return partial(feature_token_loss, draft, recipe=self.recipe, sequences=reading.sequences, **known)
        plain = partial(token_loss, draft, objective=self.args.token_objective, **known)
        if self.args.ttt_weights == "decay" or not training:
            return plain
        weigh = partial(
            dpace_weights, draft, input_ids=reading.sequences.input_ids, roots=roots, supervised=supervised
        )
        return lambda features: plain(features, weights=weigh(features=features, decay=self.decay, largest=largest))


def _recipe(args: GTOConfig, draft: DraftModel) -> FeatureLoss:
    """The published recipe with what the configuration changes."""
    name = args.token_objective
    if args.ttt_weights != "decay":
        raise ValueError(
            f"`ttt_weights={args.ttt_weights!r}` weighs losses on distributions; `token_objective={name!r}` has its own weights. "
            "Use `kl`, `lk` or `lk_hybrid`, or leave `ttt_weights` at `decay`."
        )
    if not draft.predicts_features:
        able = ", ".join(f"`{kind}`" for kind, cls in DRAFTS.items() if cls.predicts_features)
        raise ValueError(
            f"`token_objective={name!r}` compares features, but a draft of type `{draft.config.draft_type}` predicts none "
            f"(drafts of type {able} do). Use `kl`, `lk` or `lk_hybrid`."
        )
    if args.feature_noise and args.gto_weight > 0:
        raise ValueError(
            f"`feature_noise={args.feature_noise}` with `gto_weight={args.gto_weight}`: trees are drafted from the target's "
            "features as they are, so noise would train another draft than the one that decodes. Unset one of them."
        )
    recipe = FEATURE_OBJECTIVES[name]
    noise = recipe.noise if args.feature_noise is None else args.feature_noise
    return replace(
        recipe,
        feature_weight=args.feature_weight,
        token_weight=args.distribution_weight,
        topk_weight=recipe.topk_weight if args.topk_weight is None else args.topk_weight,
        topk_tokens=args.topk_tokens,
        align_top=args.align_top if recipe.align_top else 0,
        noise=0.0 if args.gto_weight > 0 else noise,
    )
