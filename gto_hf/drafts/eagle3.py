# SPDX-License-Identifier: Apache-2.0
"""
EAGLE-3 draft (Li et al. 2025, https://huggingface.co/papers/2503.01840) and its later variants. Level 2.

Module names are those of SafeAILab's checkpoints, so no renaming stands between their files and ours. What others added
(norms before the fusion, a normed output: "EAGLE-3.1") are fields of the config, off by default; names are then vLLM's.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from gto_hf.target import (
    default_feature_layers,
    final_norm,
    final_norm_scale,
    fingerprint,
    full_shape,
    gathered,
    text_config,
    unwrap,
)
from gto_hf.tree import TreeConfig

from .attention import DraftAttention, DraftRotaryEmbedding, KeyValues, narrow_to_window
from .base import DraftModel, DraftOutput
from .config import DraftConfig
from .vocab import choose_draft_vocab


class Eagle3Layer(GradientCheckpointingLayer):
    """A Llama layer whose attention reads `[norm(embedding); norm(feature)]`; the residual is the raw or normed feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # on the feature
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, *attention: Any
    ) -> tuple[torch.Tensor, KeyValues]:
        """`embeddings`, `features` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        normed = self.hidden_norm(features)
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, new = self.self_attn(inputs, *attention)
        features = (normed if self.norm_before_residual else features) + attended
        return features + self.mlp(self.post_attention_layernorm(features)), new


class PlainLayer(GradientCheckpointingLayer):
    """An ordinary Llama layer: those above the first one, which alone sees embeddings."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, features: torch.Tensor, *attention: Any) -> tuple[torch.Tensor, KeyValues]:
        """`features` `(rows, F, H)`; `attention` is passed to [`DraftAttention`] as it is."""
        attended, new = self.self_attn(self.input_layernorm(features), *attention)
        features = features + attended
        return features + self.mlp(self.post_attention_layernorm(features)), new


class Eagle3Draft(DraftModel):
    """
    One decoder layer (or more) over fused low, middle and high features of the target, with its own reduced head.

    `features` returned by [`forward`] are what the draft feeds back to itself: pre-norm, and the norm belongs to the head;
    with `config.norm_output` they are normed already.
    """

    _no_split_modules = ["Eagle3Layer", "PlainLayer"]

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        if config.draft_type != "eagle3":
            raise ValueError(f"This is a draft of type `{config.draft_type}`. Load it with `gto_hf.AutoDraft`.")
        count, width, eps = len(config.feature_layers), config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(count * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, config.hidden_size, bias=config.fc_bias)
        self.midlayer = Eagle3Layer(config)
        # Named by their place in the stack, as speculators names them; the first layer keeps SafeAILab's name.
        self.layers = nn.ModuleDict({str(i): PlainLayer(config) for i in range(1, config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.post_init()

    def fuse(self, target_features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.fuse`]."""
        features = target_features.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[KeyValues] | None,
        past_mask: torch.Tensor,
        nodes: list[KeyValues] | None = None,
        node_mask: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> DraftOutput:
        """
        See [`DraftModel.forward`]. With a window the last entry of `key_values` holds the positions `(rows, 1, F, 1)`.
        """
        embeddings = self.embed(input_ids) if embeddings is None else embeddings
        rotary = self.rotary_emb(embeddings, position_ids)
        window, key_values = self.config.sliding_window, []
        if window is not None:
            known = [None if cache is None else cache[-1][0][:, 0, :, 0] for cache in (past, nodes)]
            past_mask, node_mask = narrow_to_window(window, position_ids, known[0], past_mask, known[1], node_mask)
        for i, layer in enumerate((self.midlayer, *self.layers.values())):
            states = (embeddings, features) if i == 0 else (features,)
            past_layer, nodes_layer = past[i] if past else None, nodes[i] if nodes else None
            features, new = layer(*states, rotary, past_layer, past_mask, nodes_layer, node_mask)
            key_values.append(new)
        if window is not None:
            own = position_ids[:, None, :, None]
            key_values.append((own, own))
        return DraftOutput(self.norm(features) if self.config.norm_output else features, key_values)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """See [`DraftModel.head`]."""
        return self.lm_head(features if self.config.norm_output else self.norm(features))

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        *,
        draft_vocab_size: int | None = None,
        token_counts: torch.Tensor | None = None,
        tokenizer: Any = None,
        feature_layers: list[int] | tuple[int, ...] | None = None,
        tree: TreeConfig | None = None,
        dtype: torch.dtype | None = None,
        init: str = "target",
        **config_kwargs: Any,
    ) -> Self:
        """
        A fresh draft shaped like its target, ready to train.

        Width, heads, norm epsilon, activation and RoPE are the target's. What is not copied from the target starts random,
        under the global torch seed.

        Args:
            target (`PreTrainedModel`): Unchanged causal LM.
            draft_vocab_size (`int`, *optional*): Rows of the draft's head; defaults to the whole vocabulary.
            token_counts (`torch.LongTensor` of shape `(V,)`, *optional*): Token frequencies in the training text (see
                [`count_tokens`]). Needed for a reduced vocabulary.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Its special and added tokens are always kept.
            feature_layers (`list[int]`, *optional*): Indices into the target's `hidden_states`; defaults to EAGLE-3's
                `(2, n // 2, n - 3)`.
            tree ([`TreeConfig`], *optional*): Decoding tree.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the draft's weights.
            init (`str`, *optional*, defaults to `"target"`): What starts as a copy of the target's, where the shapes agree:
                `"target"`: head rows, final norm and, for targets built like Llama, the layer; `"head"`: head rows and final
                norm; `"random"`: nothing.
            **config_kwargs: Any [`DraftConfig`] field, for example `hidden_size=1024`, or an EAGLE-3.1 draft's
                `norm_before_fc=True, norm_before_residual=True, norm_output=True`.

        Raises:
            ValueError: If a reduced vocabulary comes without counts, or the fields do not fit each other.
        """
        if init not in ("target", "head", "random"):
            raise ValueError(f"`init={init!r}`: choose `target`, `head` or `random`.")
        config = cls._config_like(target, draft_vocab_size, feature_layers, tree, config_kwargs)
        draft = cls(config).to(dtype or torch.float32)
        if config.draft_vocab_size < config.vocab_size:
            if token_counts is None:
                raise ValueError(
                    f"`draft_vocab_size={config.draft_vocab_size}` of {config.vocab_size} tokens needs `token_counts`: "
                    "which tokens are kept decides what the draft can say. Use `gto_hf.count_tokens(rows, vocab_size)` for "
                    "rows of ids, or `gto_hf.data.dataset_token_counts(dataset, tokenizer, vocab_size)`."
                )
            if len(token_counts) != config.vocab_size:
                raise ValueError(
                    f"`token_counts` has {len(token_counts)} entries, but the target has {config.vocab_size} tokens. "
                    "Count with `vocab_size` of the target's config."
                )
            keep = _structural_ids(target, tokenizer)
            draft.set_vocab(choose_draft_vocab(token_counts.cpu(), config.draft_vocab_size, keep))
        model = unwrap(target)
        if init != "random":
            with gathered(
                model.get_output_embeddings(),
                model.get_input_embeddings(),
                final_norm(target),
                *_last_layers(target, config.num_hidden_layers),
            ):
                draft._copy_from(target, layer=init == "target")
        return draft.attach(target)

    @staticmethod
    def _config_like(
        target: nn.Module,
        draft_vocab_size: int | None,
        feature_layers: list[int] | tuple[int, ...] | None,
        tree: TreeConfig | None,
        overrides: dict[str, Any],
    ) -> DraftConfig:
        """A [`DraftConfig`] with the target's shape; `overrides` win."""
        source = text_config(target)
        width = overrides.get("hidden_size", source.hidden_size)
        heads = source.num_attention_heads
        fields: dict[str, Any] = {
            "vocab_size": source.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "hidden_size": width,
            "target_hidden_size": source.hidden_size,
            "own_embeddings": width != full_shape(unwrap(target).get_input_embeddings().weight)[-1],
            "intermediate_size": _one(getattr(source, "intermediate_size", None)) or 4 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
            "head_dim": getattr(source, "head_dim", None) or width // heads,
            "hidden_act": "silu",
            "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
            "max_position_embeddings": getattr(source, "max_position_embeddings", 2048),
            "rope_parameters": _plain_rope(source),
            "feature_layers": feature_layers or default_feature_layers(source.num_hidden_layers),
            "tree": None if tree is None else tree.to_dict(),
            "target": fingerprint(target),
            "bos_token_id": source.bos_token_id,
            "eos_token_id": source.eos_token_id,
            "pad_token_id": source.pad_token_id,
            "initializer_range": getattr(source, "initializer_range", 0.02),
        }
        return DraftConfig(**{**fields, **overrides})

    @torch.no_grad()
    def _copy_from(self, target: nn.Module, *, layer: bool) -> None:
        """
        Start from what the target knows, where the shapes agree.

        Head rows, final norm and own embedding are the target's. The layers start as the target's last ones, the first of
        them reading the feature, and `fc` as the highest feature plus a little of the others: the draft then starts in the
        target's own basis, on the scale its head rows expect.
        """
        model = unwrap(target)
        head = model.get_output_embeddings()
        _copy(self.lm_head.weight, getattr(head, "weight", None), rows=self.kept_ids)
        _copy(self.norm.weight, final_norm_scale(target))
        if self.config.own_embeddings:
            _copy(self.embed_tokens.weight, model.get_input_embeddings().weight)
        width = self.config.hidden_size
        if self.config.target_hidden_size != width or not layer:
            return
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, dtype=self.dtype, device=self.device)
        own = (self.midlayer, *self.layers.values())
        for to, source in zip(own, _last_layers(target, len(own)), strict=False):
            _copy_layer(to, source)


def _copy_layer(layer: nn.Module, source: nn.Module) -> None:
    """Start a draft's layer as one of its target's; a first layer reads in it the feature, its embedding stays random."""
    own = dict(layer.named_parameters())
    fused = "hidden_norm.weight" in own
    for name, weight in source.named_parameters():
        if fused and name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            _copy(own[name][:, own[name].shape[1] // 2 :], weight)
        elif fused and name == "input_layernorm.weight":
            _copy(own["hidden_norm.weight"], weight)
        elif name in own:
            _copy(own[name], weight)


def _copy(to: torch.Tensor, source: torch.Tensor | None, rows: torch.Tensor | None = None) -> None:
    """Copy if there is something of the same shape to copy."""
    source = _plain(source)
    if source is None:
        return
    if rows is not None and source.shape[-1] == to.shape[-1]:
        source = source[rows.to(source.device)]
    if source.shape == to.shape:
        to.copy_(source)


def _plain(weight: torch.Tensor | None) -> torch.Tensor | None:
    """A weight as an ordinary tensor; None for packed ones (bitsandbytes), which only their layer can read."""
    if weight is None or not weight.is_floating_point():
        return None
    # torchao's weights say that they are floating point, but cannot be indexed or copied from.
    return weight if type(weight) in (torch.Tensor, nn.Parameter) else weight.dequantize()


def _last_layers(target: nn.Module, count: int) -> list[nn.Module]:
    """The target's last `count` decoder layers, lowest first; fewer if it has fewer whose parts have Llama's names."""
    layers = [m for m in unwrap(target).modules() if hasattr(m, "self_attn") and hasattr(m, "input_layernorm")]
    return layers[-count:]


def _one(value: Any) -> Any:
    """The last of a list: some targets (Gemma 3n) give a size per layer."""
    return value[-1] if isinstance(value, (list, tuple)) else value


def _plain_rope(source: Any) -> dict[str, Any]:
    """The target's rotary parameters if they are one flat set; otherwise the default rotary with base 10,000."""
    rope = getattr(source, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or rope.get("mrope_section"):
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return dict(rope)


def _structural_ids(target: nn.Module, tokenizer: Any) -> set[int]:
    """Ids that are rare in text but must stay sayable: special, added and byte-level tokens, BOS and EOS."""
    config = unwrap(target).config
    keep: set[int] = set()
    for source in (text_config(target), getattr(unwrap(target), "generation_config", None), config):
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(source, name, None)
            keep.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    if tokenizer is not None:
        keep.update(tokenizer.all_special_ids)
        keep.update(tokenizer.added_tokens_decoder)
        # Every byte must stay sayable, or text outside the corpus's alphabet drafts nothing.
        single = [token for token in tokenizer.get_vocab() if len(token) == 1 or _is_byte(token)]
        keep.update(i for i in tokenizer.convert_tokens_to_ids(single) if i is not None)
    return keep


def _is_byte(token: str) -> bool:
    """Whether a token is a SentencePiece byte such as `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
