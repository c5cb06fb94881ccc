# SPDX-License-Identifier: Apache-2.0
"""Configuration of a draft model. Level 2: knows the tree, not the target."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from gto_hf.tree import TreeConfig


FORMAT_VERSION = 2  # 1 wherever a folder uses nothing that version 1 would misread


# Fields that change an EAGLE-3 draft's function or tensors; all are off in EAGLE's own drafts. The first are its alone.
_OF_EAGLE3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FLAGS = (*_OF_EAGLE3, "fc_bias", "qk_norm", "attention_output_bias")

# Drafts that predict the target's last hidden state and use the target's own head.
LAST_FEATURE_TYPES = ("eagle", "griffin")


class DraftConfig(LlamaConfig):
    """
    Configuration of a [`DraftModel`]; the Llama fields describe the draft's own decoder layer.

    Args:
        draft_type (`str`, *optional*, defaults to `"eagle3"`):
            Which class of `DRAFTS` these weights belong to.
        vocab_size (`int`):
            Rows of the **target's** vocabulary. `generate` compares it with the target's.
        draft_vocab_size (`int`, *optional*):
            Rows of the draft's own head; defaults to `vocab_size`.
        target_hidden_size (`int`, *optional*):
            Width of the target; defaults to `hidden_size`.
        feature_layers (`tuple[int, ...]`):
            Indices into the target's Hugging Face `hidden_states` (0 = embeddings, `k` = output of layer `k - 1`), low
            to high. vLLM and speculators use the same numbers; SpecForge, SGLang and ModelOpt files hold `k - 1`.
        own_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the draft stores a token embedding. If not, it borrows the target's (see [`DraftModel.attach`]).
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            EAGLE-3: the residual starts from the normed feature instead of the raw one.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            EAGLE-3: one norm over all target features together, before they are fused. Excludes `fc_norm`.
        fc_norm (`bool`, *optional*, defaults to `False`):
            EAGLE-3: a norm over each target feature, before they are fused.
        norm_output (`bool`, *optional*, defaults to `False`):
            EAGLE-3: what the draft feeds back to itself is normed, as what its head reads always is.
        fc_bias (`bool`, *optional*, defaults to `False`):
            Whether the layer that fuses features, or joins embedding and feature, has a bias.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether queries and keys are normed per head, as Qwen3's.
        attention_output_bias (`bool`, *optional*, defaults to `False`):
            Whether `o_proj` has a bias; `attention_bias` is that of `q_proj`, `k_proj` and `v_proj`.
        sliding_window (`int`, *optional*):
            The draft sees only pairs of the last `sliding_window` positions, its own included.
        source (`dict`, *optional*):
            Where a draft of another project came from: `dialect`, and `decisions`, a list of what its files left open
            and how it was decided.
        trained_length (`int`, *optional*):
            Longest row, in tokens, that the draft saw in training. Apart from `max_position_embeddings` on purpose:
            rotary angles are computed on the fly and have no limit of their own.
        tree (`dict`, *optional*):
            The decoding tree, as [`TreeConfig.to_dict`] gives it.
        lm (`dict`, *optional*):
            Config of the language model inside a `causal_lm` draft, `model_type` included.
        layernorms (`bool`, *optional*, defaults to `False`):
            Of an `eagle` draft: norms on the embedding, before the attention and before the head.
        target (`dict`, *optional*):
            Fingerprint of the target the draft was made for: `name_or_path`, `revision`, `model_type`, `hidden_size`,
            `num_hidden_layers`, `vocab_size`, `quantization`, and `tokenizer`, a hash of what every id stands for (drafts
            saved before it was recorded have none).

    Raises:
        ValueError: If the fields contradict each other, or the folder was written by a newer format.
    """

    model_type = "gto_draft"

    draft_type: str = "eagle3"
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    feature_layers: list[int] | tuple[int, ...] | None = None
    own_embeddings: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    attention_output_bias: bool = False
    sliding_window: int | None = None
    source: dict[str, Any] | None = None
    trained_length: int | None = None
    tree: dict[str, int] | None = None
    lm: dict[str, Any] | None = None
    layernorms: bool = False
    target: dict[str, Any] | None = None
    format_version: int = 1
    num_hidden_layers: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        self.tie_word_embeddings = False  # the draft's head is its own, whatever the target does
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = False
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self.feature_layers = list(self.feature_layers or [])
        self.tree = TreeConfig(**(self.tree or {})).to_dict()
        self._check()
        self.format_version = FORMAT_VERSION if self._needs_version_2() else 1

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated: all of them, or the share that `partial_rotary_factor` says."""
        return int(self.head_dim * (self.rope_parameters or {}).get("partial_rotary_factor", 1.0))

    def _needs_version_2(self) -> bool:
        """Whether a reader of version 1 would load this draft and compute something else."""
        added = (*_FLAGS, "sliding_window")
        return (
            self.draft_type == "eagle3" and any(getattr(self, name) for name in added)
        ) or self.rotary_dim != self.head_dim

    def validate_architecture(self) -> None:
        """Unlike Llama, `head_dim` is explicit, so heads need not divide the width."""

    def _check(self) -> None:
        check_tree(TreeConfig(**self.tree), self.draft_vocab_size)
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"This draft was saved with `format_version={self.format_version}`; this gto-hf reads up to "
                f"{FORMAT_VERSION}. Upgrade gto-hf."
            )
        if self.draft_type == "causal_lm":
            if not self.lm:
                raise ValueError("A `causal_lm` draft needs the config of its model (`lm`).")
        elif self.num_hidden_layers < 1:
            raise ValueError(
                f"A draft needs at least one layer, but `num_hidden_layers={self.num_hidden_layers}` was given."
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size={self.draft_vocab_size}` must lie between 1 and `vocab_size={self.vocab_size}`."
            )
        layers = self.feature_layers
        if any(i < 0 for i in layers) or sorted(set(layers)) != layers:
            raise ValueError(
                f"`feature_layers={layers}` must be distinct indices into `hidden_states`, in ascending order."
            )
        if not self.own_embeddings and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"A draft of width {self.hidden_size} cannot borrow the embedding of a target of width "
                f"{self.target_hidden_size}. Set `own_embeddings=True`."
            )
        if self.draft_type in LAST_FEATURE_TYPES:
            self._check_last_feature()
        if self.draft_type != "causal_lm":
            self._check_attention()

    def _check_attention(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "`norm_before_fc` (all features together) and `fc_norm` (each for itself) exclude each other."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window={self.sliding_window}` must be at least 1, or None for no window.")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"{self.rotary_dim} of `head_dim={self.head_dim}` dimensions would be rotated; it must be an even number "
                "between 2 and `head_dim`. Check `head_dim` and `partial_rotary_factor`."
            )

    def _check_last_feature(self) -> None:
        """An EAGLE-1/2 or GRIFFIN draft predicts one feature, which the target's head reads."""
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"A draft of type `{self.draft_type}` uses its target's head, so its width must be the target's: "
                f"`hidden_size={self.hidden_size}`, `target_hidden_size={self.target_hidden_size}`."
            )
        if len(self.feature_layers) > 1:
            raise ValueError(
                f"A draft of type `{self.draft_type}` reads the target's last hidden state alone, but "
                f"`feature_layers={self.feature_layers}`."
            )
        foreign = [name for name in (*_OF_EAGLE3, "sliding_window") if getattr(self, name)]
        if foreign or self.num_hidden_layers != 1:
            raise ValueError(
                f"A draft of type `{self.draft_type}` has one layer and none of EAGLE-3's options, but got "
                f"`num_hidden_layers={self.num_hidden_layers}` and {foreign}."
            )


def check_tree(tree: TreeConfig, draft_vocab_size: int) -> None:
    """Raise `ValueError` if a node of the tree would need more children than the draft has tokens."""
    if tree.top_k > draft_vocab_size:
        raise ValueError(
            f"`top_k={tree.top_k}` is more than the draft's vocabulary of {draft_vocab_size}. Choose a smaller tree."
        )
