# SPDX-License-Identifier: Apache-2.0
"""Configuration of [`GTOTrainer`]. Level 6."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from gto_hf.export import ENGINES
from gto_hf.gto import AGGREGATIONS, FEATURE_OBJECTIVES, STEP_WEIGHTS, TOKEN_OBJECTIVES
from gto_hf.hub import publishable
from gto_hf.tree import TreeConfig


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "token_objective": (*TOKEN_OBJECTIVES, *FEATURE_OBJECTIVES),
    "ttt_weights": STEP_WEIGHTS,
    "gto_objective": ("gto", "tree_kl", "membership"),
    "gto_aggregation": AGGREGATIONS,
    "gto_path": ("greedy", "sample"),
    "group_positions": ("random", "grid"),
    "train_on": ("all", "last"),
    "export_to": (None, *ENGINES),
}


# docstyle-ignore
@dataclass
class GTOConfig(SFTConfig):
    r"""
    Configuration class for the [`GTOTrainer`].

    Every argument of [`~trl.SFTConfig`] works as there, except for those that the draft's losses cannot honour
    (`packing`, `padding_free`, `label_smoothing_factor`, ..), which are refused.

    > [!NOTE]
    > Defaults that differ: `learning_rate=5e-6`, `adam_beta1=0.9`, `adam_beta2=0.95`, `max_grad_norm=0.5` and
    > `max_length=2048` are the paper's; `activation_checkpointing` is off because a draft is small;
    > `ddp_find_unused_parameters=False` because every parameter is used; `use_cpu=True` where there is no accelerator.

    Parameters:
        > Parameters that control the target

        target_model_name_or_path (`str`, *optional*):
            Target to load when [`GTOTrainer`] gets no `target_model`. Defaults to the one named in the draft's config.
        target_model_init_kwargs (`dict[str, Any]`, *optional*):
            Keyword arguments for loading the target, for example `{"dtype": "bfloat16"}`.

        features_path (`str`, *optional*):
            Folder that keeps the target's features of every row, for training without trees (`gto_weight=0`): later epochs,
            and later runs, then need no target forward. Its size is printed first.

        > Parameters that control the token loss

        ttt_steps (`int`, *optional*):
            Unrolled steps of training-time test. Defaults to the depth of the tree: as deep as decoding looks; for `"eagle"`,
            `"hass"` and `"griffin"` to their 1, 3 and 2.
        ttt_decay (`float`, *optional*):
            Step `k` (from 0) weighs `ttt_decay**k`. Defaults to 0.8; for `"eagle"`, `"hass"` and `"griffin"` to 1.
        ttt_weights (`str`, *optional*, defaults to `"decay"`):
            `"decay"` weighs the steps of all roots alike. `"dpace"` (arXiv 2605.18810) weighs a step by what the expected length
            of a drafted chain gains by it: more where the draft gets that far, and goes on. Costs one more pass of the head. Such a loss is
            smaller at first (to a quarter) and can grow as the draft improves: `gto_weight` then weighs more, `ttt_decay` only scales,
            and evaluation logs the loss with `"decay"`.
        skip_unsayable (`bool`, *optional*, defaults to `True`):
            Leave positions out of the token loss whose most likely target token is outside the draft's vocabulary.

        token_objective (`str`, *optional*, defaults to `"kl"`):
            Loss between draft and target distributions: `"kl"` (EAGLE-3's soft cross-entropy), `"lk"` or `"lk_hybrid"`
            (arXiv 2602.23881). For drafts that predict the target's features (EAGLE-1/2, GRIFFIN) also `"eagle"` (smooth L1 on
            the features plus soft cross-entropy), `"hass"` (the same unrolled, plus the target's likeliest tokens) and
            `"griffin"` (as HASS, without the steps that follow a token the draft would not have drafted).
        feature_weight (`float`, *optional*, defaults to `1.0`): Of those three: weight of smooth L1 on the features.
        distribution_weight (`float`, *optional*, defaults to `0.1`): Of those three: weight of the soft cross-entropy.
        topk_weight (`float`, *optional*):
            Of those three: weight of the cross-entropy over the target's likeliest tokens. Defaults to the recipes' 0, 1, 0.5.
        topk_tokens (`int`, *optional*, defaults to `10`): How many of them.
        align_top (`int`, *optional*, defaults to `3`):
            Of `"griffin"`: a token that is not among the draft's so many likeliest ends the steps of its root; `0` keeps them.
        feature_noise (`float`, *optional*):
            Width of uniform noise on the features that the draft reads in training, times 512 / length of the row. Defaults to
            EAGLE's 0.2 for `"eagle"` without trees, else to 0: trees are drafted from the features as they are.

        > Parameters that control the tree (training only; the draft's own tree decodes)

        tree_depth (`int`, *optional*): Longest path in tokens after the root. Defaults to the draft's.
        tree_top_k (`int`, *optional*): Children per node and nodes per level. Defaults to the draft's.
        tree_total_tokens (`int`, *optional*): Nodes kept, root excluded. Defaults to the draft's.

        > Parameters that control Group Tree Optimization

        gto_weight (`float`, *optional*, defaults to `0.5`):
            Weight ω of the GTO term. `0` trains the token loss alone: Phase I, or the continued-training control.
        gto_objective (`str`, *optional*, defaults to `"gto"`):
            `"gto"` is the paper's. `"tree_kl"` (soft cross-entropy at every inner node of the draft's trees, weighted by how
            likely verification gets there) and `"membership"` (soft expected acceptance of the tree) are ours; they use
            no reference draft.
        gto_beta (`float`, *optional*, defaults to `1.0`): Softness of `"membership"`, in nats.
        num_groups (`int`, *optional*, defaults to `16`): Groups per sequence, K; fewer on short rows.
        group_size (`int`, *optional*, defaults to `8`):
            Adjacent positions per group, m. `1` makes every advantage zero, so it is the control too.
        gto_aggregation (`str`, *optional*, defaults to `"lse"`):
            How branches make a tree reward: `"lse"`, `"max"`, `"mean"`, or `"nodes"` (the true expectation).
        gto_eta (`float`, *optional*, defaults to `1.0`): Sharpness η of `"lse"`.
        gto_epsilon (`float`, *optional*, defaults to `0.2`): Clip range ε. The paper gives none.
        gto_delta (`float`, *optional*, defaults to `1e-4`): Added to the group's standard deviation. The paper gives none.
        gto_debias (`bool`, *optional*, defaults to `True`): Subtract the reference draft's rewards.
        gto_path (`str`, *optional*, defaults to `"greedy"`):
            How the target accepts a path: its most likely token at every node, or a `"sample"`. A sample follows from the seed,
            the step and the row: another layout of the batch, or other ranks, draw the same.
        target_temperature (`float`, *optional*, defaults to `1.0`): Of the target in rewards and sampled paths.
        group_positions (`str`, *optional*, defaults to `"random"`):
            `"random"` draws other groups every epoch; `"grid"` takes the same ones, so that the reference's trees and
            rewards are computed in the first epoch only (and kept in `reference_path`). A run that is resumed, or started again, finds
            what was kept: its `gto/target_nodes` are fewer, and nothing else differs.
        reference_path (`str`, *optional*):
            Folder for them; defaults to `reference-trees` in `output_dir`.
        score_nodes (`int`, *optional*, defaults to `1024`):
            Tree nodes per row in one target forward. Memory against speed; results do not depend on it.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Without it the ratio at the first step would not be 1.

        > Parameters that control evaluation and the report

        eval_prompts (`int`, *optional*, defaults to `8`):
            Prompts of every evaluation set that are decoded, as a tree and as a chain, to log `eval_tau`; `0` is off.
            With it `metric_for_best_model="tau"` works. `eval_runtime` includes this decoding.
        eval_max_new_tokens (`int`, *optional*, defaults to `64`): New tokens per prompt, at least 2.
        eval_temperature (`float`, *optional*, defaults to `0.0`): Temperature of that decoding; 0 is greedy.
        report (`bool`, *optional*, defaults to `True`):
            Keep `output_dir/report` up to date: `metrics.csv`, `table.md` and, with matplotlib, `training.png`.
        export_to (`str`, *optional*):
            Engine that the draft is meant for (`"sglang"`, `"vllm"`, `"speculators"`, `"safeailab"`): refuse at the start
            to train one that could not be exported to it.

        > Parameters that control the data

        assistant_only_loss (`bool`, *optional*):
            By default conversations train what the assistant says, and other rows are taken as well; with or without
            `{% generation %}` in the chat template. `True` refuses rows that are no conversation, as TRL does. `False`
            trains every token of a conversation.
        train_on (`str`, *optional*, defaults to `"all"`):
            Assistant turns of a conversation that are trained: `"all"`, or the `"last"` one. Labels and masks that come
            with `input_ids` are taken as they are.
    """

    _VALID_DICT_FIELDS = SFTConfig._VALID_DICT_FIELDS + ["target_model_init_kwargs"]

    learning_rate: float = field(default=5e-6, metadata={"help": "The initial learning rate for AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 for AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Max gradient norm."})
    max_length: int | None = field(default=2048, metadata={"help": "Longest row in tokens; longer ones are cut."})
    # TRL turns it on under its old name, which transformers warns of; unset, both names are off.
    gradient_checkpointing: bool | None = field(default=None, metadata={"help": "Use activation_checkpointing."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "See DistributedDataParallel."})

    target_model_name_or_path: str | None = field(default=None, metadata={"help": "Target to load."})
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for loading the target."}
    )
    features_path: str | None = field(default=None, metadata={"help": "Folder that keeps the target's features."})
    ttt_steps: int | None = field(default=None, metadata={"help": "Unrolled steps; default: depth of the tree."})
    ttt_decay: float | None = field(default=None, metadata={"help": "Step k of the token loss weighs ttt_decay**k."})
    ttt_weights: str = field(
        default="decay", metadata={"help": "How unrolled steps weigh.", "choices": list(_CHOICES["ttt_weights"])}
    )
    skip_unsayable: bool = field(
        default=True, metadata={"help": "Leave out positions whose top target token the draft cannot say."}
    )
    token_objective: str = field(
        default="kl", metadata={"help": "Loss of every unrolled step.", "choices": list(_CHOICES["token_objective"])}
    )
    feature_weight: float = field(default=1.0, metadata={"help": "Weight of smooth L1 on predicted features."})
    distribution_weight: float = field(default=0.1, metadata={"help": "Weight of soft cross-entropy beside it."})
    topk_weight: float | None = field(default=None, metadata={"help": "Weight of the target's likeliest tokens."})
    topk_tokens: int = field(default=10, metadata={"help": "How many likeliest tokens."})
    align_top: int = field(default=3, metadata={"help": "Draft tokens that a step of GRIFFIN must follow; 0: any."})
    feature_noise: float | None = field(default=None, metadata={"help": "Width of uniform noise on read features."})
    tree_depth: int | None = field(default=None, metadata={"help": "Depth of training trees; default: the draft's."})
    tree_top_k: int | None = field(default=None, metadata={"help": "Branching of training trees."})
    tree_total_tokens: int | None = field(default=None, metadata={"help": "Nodes of training trees, root excluded."})
    gto_weight: float = field(default=0.5, metadata={"help": "Weight of the GTO term; 0 is token loss alone."})
    gto_objective: str = field(
        default="gto", metadata={"help": "Tree term of the loss.", "choices": list(_CHOICES["gto_objective"])}
    )
    gto_beta: float = field(default=1.0, metadata={"help": "Softness of tree membership, in nats."})
    num_groups: int = field(default=16, metadata={"help": "Groups per sequence (K)."})
    group_size: int = field(default=8, metadata={"help": "Adjacent positions per group (m)."})
    gto_aggregation: str = field(
        default="lse",
        metadata={"help": "How branches make a tree reward.", "choices": list(_CHOICES["gto_aggregation"])},
    )
    gto_eta: float = field(default=1.0, metadata={"help": "Sharpness of the lse reward."})
    gto_epsilon: float = field(default=0.2, metadata={"help": "Clip range of the ratio."})
    gto_delta: float = field(default=1e-4, metadata={"help": "Added to the group's standard deviation."})
    gto_debias: bool = field(default=True, metadata={"help": "Subtract the reference draft's rewards."})
    gto_path: str = field(
        default="greedy", metadata={"help": "How the target accepts a path.", "choices": ["greedy", "sample"]}
    )
    target_temperature: float = field(default=1.0, metadata={"help": "Temperature of the target in rewards."})
    group_positions: str = field(
        default="random", metadata={"help": "New groups every epoch, or the same.", "choices": ["random", "grid"]}
    )
    reference_path: str | None = field(default=None, metadata={"help": "Folder of M0's trees, for a grid."})
    score_nodes: int = field(default=1024, metadata={"help": "Tree nodes per row in one target forward."})
    disable_dropout: bool = field(default=True, metadata={"help": "Switch the draft's dropout off."})
    eval_prompts: int = field(default=8, metadata={"help": "Prompts decoded in every evaluation for tau; 0 is off."})
    eval_max_new_tokens: int = field(default=64, metadata={"help": "New tokens per decoded prompt, at least 2."})
    eval_temperature: float = field(default=0.0, metadata={"help": "Temperature of that decoding; 0 is greedy."})
    report: bool = field(default=True, metadata={"help": "Write tables and plots to output_dir/report."})
    export_to: str | None = field(
        default=None, metadata={"help": "Engine the draft is for; refused at the start if it could not be exported."}
    )
    assistant_only_loss: bool | None = field(
        default=None, metadata={"help": "Default: conversations train assistant turns. False: every token."}
    )
    train_on: str = field(
        default="all", metadata={"help": "Assistant turns that are trained.", "choices": ["all", "last"]}
    )

    def __post_init__(self) -> None:
        if not self.use_cpu and not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        self._refuse_inherited()
        self._refuse_nonfinite()
        if self.fp16 and self.use_cpu:
            warnings.warn(
                "`fp16=True` does nothing on a CPU: training runs in float32. Set `bf16=True` for half precision."
            )
        positive = (
            "num_groups",
            "group_size",
            "gto_eta",
            "gto_delta",
            "gto_beta",
            "target_temperature",
            "score_nodes",
            "ttt_decay",
            "topk_tokens",
        )
        for name in positive:
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"`{name}={getattr(self, name)}` must be positive.")
        if self.gto_weight < 0 or not 0 < self.gto_epsilon < 1:
            raise ValueError(
                f"`gto_weight={self.gto_weight}` must not be negative, and `gto_epsilon={self.gto_epsilon}` must lie "
                "between 0 and 1."
            )
        if self.features_path is not None and self.gto_weight > 0:
            raise ValueError(
                f"`features_path={self.features_path}` has no use with `gto_weight={self.gto_weight}`: trees hang on the "
                "target's keys and values, so it must be run in every step. Unset one of them."
            )
        if self.ttt_steps is not None and self.ttt_steps < 1:
            raise ValueError(f"`ttt_steps={self.ttt_steps}` must be at least 1.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}={getattr(self, name)!r}`: choose one of {', '.join(map(str, choices))}.")
        least_values = {
            "eval_prompts": 0,
            "eval_max_new_tokens": 2,
            "eval_temperature": 0.0,
            "feature_weight": 0.0,
            "distribution_weight": 0.0,
            "topk_weight": 0.0,
            "align_top": 0,
            "feature_noise": 0.0,
        }
        for name, least in least_values.items():
            if getattr(self, name) is not None and not getattr(self, name) >= least:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least {least}.")

    def _refuse_inherited(self) -> None:
        """Options of SFTConfig that would be ignored or would let a tree see another document."""
        refused = {
            "packing": "trees must not see another document",
            "padding_free": "trees must not see another document",
            "eval_packing": "trees must not see another document",
            "activation_offloading": "it is not supported for drafts",
            "label_smoothing_factor": "labels are the target's own distributions",
            "use_liger_kernel": "a draft is not a Liger model",
            "neftune_noise_alpha": "a draft's embedding is its target's",
            "eos_token": "a text ends where the target's generation config says",
            "pad_token": "what is padded is never read; the tokenizer's own token does",
        }
        for name, reason in refused.items():
            if getattr(self, name):
                raise ValueError(f"`{name}={getattr(self, name)}` cannot be used with GTOTrainer: {reason}. Unset it.")
        if self.chat_template_path is not None and Path(self.chat_template_path).suffix not in (".jinja", ".j2"):
            raise ValueError(
                f"`chat_template_path={self.chat_template_path}` must be a file `.jinja` or `.j2`: the tokens of another tokenizer "
                "cannot be added to a draft."
            )
        if self.loss_type != "nll":
            raise ValueError(
                f"`loss_type={self.loss_type!r}` has no meaning for a draft; GTOConfig has its own losses."
            )

    def _refuse_nonfinite(self) -> None:
        """NaN passes comparisons that are meant to refuse it, and infinity passes most."""
        for name in set(GTOConfig.__annotations__) - set(SFTConfig.__dataclass_fields__):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}={value}` must be a finite number.")

    def tree(self, draft_tree: TreeConfig) -> TreeConfig:
        """The training tree: the draft's, with what this config overrides."""
        given = {"depth": self.tree_depth, "top_k": self.tree_top_k, "total_tokens": self.tree_total_tokens}
        return TreeConfig(**{**draft_tree.to_dict(), **{k: v for k, v in given.items() if v is not None}})

    def __getstate__(self) -> dict[str, Any]:
        # `training_args.bin` is a pickle of this object and is pushed to the Hub: keep tokens and paths out of it.
        return publishable(self.__dict__)

    def to_json_string(self) -> str:
        """As in [`~transformers.TrainingArguments`], for loggers whose files in `output_dir` are pushed: without paths."""
        return json.dumps(publishable(self.to_dict()), indent=2)

    def __copy__(self) -> GTOConfig:
        return self._copied(self.__dict__)

    def __deepcopy__(self, memo: dict) -> GTOConfig:
        return self._copied(copy.deepcopy(self.__dict__, memo))

    def _copied(self, values: dict[str, Any]) -> GTOConfig:
        """A config with these values: copies keep what pickles leave out."""
        new = object.__new__(type(self))
        new.__dict__.update(values)
        return new
