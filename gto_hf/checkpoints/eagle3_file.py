# SPDX-License-Identifier: Apache-2.0
"""
What all spellings of an EAGLE-3 checkpoint share: names made ours, sizes read from tensors, decisions noted. Level 3.

A dialect says how its files are recognised and what their fields mean; everything else is here. The config is never
trusted for a size: it is compared with the tensors, and a contradiction is an error that names both.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from gto_hf.drafts import DraftCheckpointError, DraftConfig
from gto_hf.target import default_feature_layers

from .rope import read_rope
from .stated import check_ids, flag, parts_of
from .vocabulary import complete_vocabulary


# Always there, in our names. `d2t` and `t2d` come with a reduced vocabulary, `embed_tokens.weight` if it is the draft's own.
REQUIRED = (
    "fc.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "lm_head.weight",
)
_RENAMED = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)


def is_eagle3(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these are an EAGLE-3 draft's tensors in some spelling, perhaps with a few missing."""
    names = {our_name(name) for name in tensors}
    marks = (
        "fc.weight" in names,
        any(name.startswith("midlayer.") for name in tensors),
        "midlayer.hidden_norm.weight" in names,
        "d2t" in names,
    )
    return sum(marks) >= 2


def our_name(name: str) -> str:
    """A tensor's name in our spelling."""
    for pattern, ours in _RENAMED:
        name = re.sub(pattern, ours, name)
    return name


def architecture(config: dict[str, Any]) -> str:
    """The first of `architectures`, or an empty string."""
    return str(next(iter(config.get("architectures") or []), ""))


class Eagle3File:
    """
    An EAGLE-3 checkpoint of another project on its way in.

    Attributes:
        config (`dict`): Fields of the draft's layer, a part of `config.json` in some dialects.
        tensors (`dict[str, torch.Tensor]`): In our names.
        decisions (`list[str]`): What the files left open, and how it was decided.

    Args:
        dialect (`str`): Whose spelling it is.
        source (`str`): Folder or Hub id, for messages.
        config (`dict`): See above.
        tensors (`dict[str, torch.Tensor]`): In their names.
        said (`dict`, *optional*): What the caller says of the draft: `norm_output`, `rope_parameters`.
        whole (`dict`, *optional*): All of `config.json`, where that is more than `config`: there stand norms, layer ids and
            vocabulary sizes.

    Raises:
        DraftCheckpointError: If two tensors would have one name, or required ones are missing.
    """

    def __init__(
        self,
        dialect: str,
        source: str,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        said: dict[str, Any] | None = None,
        whole: dict[str, Any] | None = None,
    ) -> None:
        self.dialect, self.source, self.config, self.said = dialect, source, config, said or {}
        self.whole = config if whole is None else whole
        self.parts = parts_of(self.whole, config)
        self.decisions: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            ours = our_name(name)
            if ours.endswith("rotary_emb.inv_freq"):  # old transformers saved what it computes
                self.note(f"`{name}` is left out: it follows from the config")
                continue
            if ours in self.tensors:
                raise DraftCheckpointError(f"`{source}` holds `{ours}` twice, once as `{name}`. Remove one of them.")
            self.tensors[ours] = tensor
        if config.get("tie_word_embeddings") and "lm_head.weight" not in self.tensors and self.own_embeddings:
            self.tensors["lm_head.weight"] = self.tensors["embed_tokens.weight"].clone()
            self.note(
                "`tie_word_embeddings`: the head is a copy of the stored embedding, and apart from it from now on"
            )
        missing = [name for name in REQUIRED if name not in self.tensors]
        if missing:
            raise DraftCheckpointError(
                f"`{source}` reads as an EAGLE-3 draft in {dialect}'s spelling, but {len(missing)} of {len(REQUIRED)} "
                f"required tensors are missing: {', '.join(f'`{k}`' for k in missing[:5])} (names as gto-hf has them)."
            )

    # ------------------------------------------------------------------ notes and checks
    def note(self, text: str, *, doubtful: bool = False) -> None:
        """Record a decision; a doubtful one is also warned about."""
        self.decisions.append(text)
        if doubtful:
            warnings.warn(f"`{self.source}`: {text}")

    def agrees(self, field: str, found: Any, where: str, config: dict[str, Any] | None = None) -> None:
        """
        Compare a field of the config with what the tensors say.

        Raises:
            DraftCheckpointError: If the field is there and says something else.
        """
        stated = (self.config if config is None else config).get(field)
        if stated is not None and stated != found:
            raise DraftCheckpointError(
                f"`config.json` of `{self.source}` says `{field}={stated}`, but by {where} it is {found}. Which of them is "
                "wrong cannot be told: repair the config, or fetch the checkpoint again."
            )

    def shape(self, name: str, dims: int = 2) -> tuple[int, ...]:
        """Shape of a tensor that must have `dims` dimensions."""
        found = tuple(self.tensors[name].shape)
        if len(found) != dims or 0 in found:
            raise DraftCheckpointError(
                f"`{name}` of `{self.source}` has shape {found}; it must have {dims} dimensions, none of them empty."
            )
        return found

    def positive(self, field: str) -> int:
        """A field of the config that must be a positive whole number."""
        value = self.config.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DraftCheckpointError(
                f"`config.json` of `{self.source}` says `{field}={value!r}`; a positive number is needed."
            )
        return value

    @property
    def own_embeddings(self) -> bool:
        """Whether an embedding is stored."""
        return "embed_tokens.weight" in self.tensors

    # ------------------------------------------------------------------ facts
    def feature_layers(
        self,
        stated: list[int] | None,
        shift: int,
        asked: list[int] | None,
        target_layers: int | None,
        *,
        rule: bool = True,
    ) -> list[int] | None:
        """
        Which `hidden_states` of the target the draft reads; None if neither files nor caller say it.

        Args:
            stated (`list[int]`, *optional*): Layer ids in the file.
            shift (`int`): What makes them `hidden_states` indices: 1 for ids of layers whose output is meant, else 0.
            asked (`list[int]`, *optional*): The caller's, which win.
            target_layers (`int`, *optional*): Layers of the target.
            rule (`bool`): Whether files that say nothing mean EAGLE-3's `(2, n // 2, n - 3)`.
        """
        if asked is not None:
            self.note(f"feature layers {asked}: the caller's")
            return list(asked)
        if stated is not None:
            if not isinstance(stated, list) or not all(type(i) is int and i >= 0 for i in stated):
                raise DraftCheckpointError(
                    f"`config.json` of `{self.source}` names the layers to read as {stated!r}; a list of numbers is needed. "
                    "Pass `feature_layers=`."
                )
            layers = [i + shift for i in stated]
            check_ids(self.source, self.parts, layers, self.dialect)
            meaning = "layers whose output is meant" if shift else "`hidden_states` indices"
            # Ids that start as the rule of the other numbering does may be a copy from there.
            copied = shift > 0 and len(stated) == 3 and stated[0] == 2
            hint = " (pass `feature_layers=` if they are `hidden_states` indices already)" if copied else ""
            self.note(f"layer ids {stated} are {meaning}: feature layers {layers}{hint}", doubtful=copied)
            return layers
        check_ids(self.source, self.parts, None, self.dialect)
        if rule and target_layers is not None:
            layers = default_feature_layers(target_layers)
            self.note(f"no layer ids are stated: EAGLE-3's rule (2, n // 2, n - 3) gives {layers}")
            return layers
        return None

    def flag(self, name: str) -> bool | None:
        """A truth value that the config states at its top, in `eagle_config` or in the layer's part; None if nowhere."""
        return flag(self.source, self.parts, name)

    def rope(self) -> dict[str, Any]:
        """The rotary parameters that the caller says, or else the config."""
        if "rope_parameters" in self.said:
            return read_rope(self.source, {"rope_parameters": self.said["rope_parameters"]}, "`rope_parameters=`")[0]
        rope, notes = read_rope(self.source, self.config)
        self.decisions.extend(notes)
        return rope

    def window(self) -> int | None:
        """
        The sliding window that the layer's config states, by the rules of transformers.

        Raises:
            DraftCheckpointError: If some layers have one and others do not.
        """
        size, count = self.config.get("sliding_window"), self.layer_count
        types = self.config.get("layer_types")
        if types is not None:
            kinds = set(types[:count])
            if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
                raise DraftCheckpointError(
                    f"`config.json` of `{self.source}` gives its layers attention of kinds {sorted(kinds)}; a draft's layers "
                    "are all full or all sliding here."
                )
            return size if kinds == {"sliding_attention"} else None
        if size is None or self.config.get("use_sliding_window") is False:
            return None
        if self.config.get("use_sliding_window") and self.config.get("max_window_layers", 0) >= count:
            self.note(f"`sliding_window={size}` is for layers above `max_window_layers`: the draft has none of them")
            return None
        self.note(f"`sliding_window={size}` holds for all layers")
        return size

    @property
    def layer_count(self) -> int:
        """Layers by the names of the tensors."""
        found = [int(m[1]) for m in (re.match(r"layers\.(\d+)\.", name) for name in self.tensors) if m]
        return 1 + max(found, default=0)

    # ------------------------------------------------------------------ result
    def finish(
        self,
        *,
        layers: list[int] | None,
        rope: dict[str, Any],
        norm_before_residual: bool | None = None,
        norm_output: bool | None = None,
        sliding_window: int | None = None,
        trained_length: int | None = None,
        counted: bool = True,
    ) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
        """
        The complete config and the tensors in our names.

        Args:
            layers (`list[int]`, *optional*): Feature layers as `hidden_states` indices.
            rope (`dict`): Rotary parameters, unless the caller said others.
            norm_before_residual, norm_output, sliding_window, trained_length: As in [`DraftConfig`]; None for a norm that the
                dialect does not know.
            counted (`bool`): Whether `num_hidden_layers` means the draft's own layers.
        """
        if counted:
            self.agrees("num_hidden_layers", self.layer_count, "the tensors' names")
        heads = self._heads()
        norm_before_residual, norm_output = self._norms(norm_before_residual, norm_output)
        if "rope_parameters" in self.said:
            rope = self.rope()
            self.note(f"rotary parameters {rope}: the caller's")
        try:
            made = DraftConfig(
                draft_type="eagle3",
                **self._sizes(layers),
                **heads,
                num_hidden_layers=self.layer_count,
                own_embeddings=self.own_embeddings,
                hidden_act=self.config.get("hidden_act") or "silu",
                rms_norm_eps=self.config.get("rms_norm_eps") or 1e-6,
                max_position_embeddings=self.config.get("max_position_embeddings") or 2048,
                rope_parameters=rope,
                norm_before_residual=norm_before_residual,
                norm_output=norm_output,
                sliding_window=sliding_window,
                trained_length=trained_length,
                **self._options(),
                bos_token_id=self.config.get("bos_token_id"),
                eos_token_id=self.config.get("eos_token_id"),
                pad_token_id=self.config.get("pad_token_id"),
                source={"dialect": self.dialect, "decisions": self.decisions},
            )
        except (ValueError, TypeError, StrictDataclassError) as error:
            if isinstance(error, DraftCheckpointError):
                raise
            raise DraftCheckpointError(f"`config.json` of `{self.source}` describes no draft: {error}") from error
        complete_vocabulary(self.source, made.vocab_size, made.draft_vocab_size, self.tensors)
        return made, self.tensors

    def _norms(self, before_residual: bool | None, output: bool | None) -> tuple[bool, bool]:
        """`norm_before_residual` and `norm_output`: the caller's, the dialect's, or a field that the dialect does not know."""
        if before_residual is None:
            before_residual = bool(self.flag("norm_before_residual"))
            if before_residual:
                self.note(
                    f"`norm_before_residual=True` is no field of {self.dialect}'s: taken as stated, as vLLM does",
                    doubtful=True,
                )
        if self.said.get("norm_output") is not None:
            output = bool(self.said["norm_output"])
            self.note(f"norm_output={output}: the caller's")
        elif output is None and self.flag("norm_output"):
            raise DraftCheckpointError(
                f"`config.json` of `{self.source}` says `norm_output=True`, which is no field of {self.dialect}'s. Pass "
                "`norm_output=True` if what the draft feeds back to itself is normed, else `norm_output=False`."
            )
        return before_residual, bool(output)

    def _sizes(self, layers: list[int] | None) -> dict[str, Any]:
        """Widths, vocabularies and feature layers."""
        width, fused = self.shape("fc.weight")
        self.agrees("hidden_size", width, "`fc.weight`")
        target_width = self.whole.get("target_hidden_size") or self.config.get("target_hidden_size") or width
        if type(target_width) is not int or target_width < 1:
            raise DraftCheckpointError(
                f"`config.json` of `{self.source}` says `target_hidden_size={target_width!r}`; a positive number is needed."
            )
        if "fc_norm.0.weight" in self.tensors and self.shape("fc_norm.0.weight", 1)[0] != target_width:
            raise DraftCheckpointError(
                f"`fc_norm.0.weight` of `{self.source}` is for features of width {self.shape('fc_norm.0.weight', 1)[0]}, but "
                f"the config's target has width {target_width}."
            )
        count, rest = divmod(fused, target_width)
        if layers is None:
            raise DraftCheckpointError(
                f"`{self.source}` does not say which layers of its target it reads ({fused} features of width "
                f"{target_width} each). Pass `feature_layers=` as indices into `hidden_states`, or `target=` where EAGLE-3's "
                "rule (2, n // 2, n - 3) is meant."
            )
        if rest or count != len(layers):
            raise DraftCheckpointError(
                f"`fc.weight` of `{self.source}` reads {fused} features, but {len(layers)} layers of width {target_width} "
                f"give {len(layers) * target_width}. Pass the right `feature_layers=`."
            )
        for part in self.parts:
            self.agrees("num_aux_hidden_states", count, "`fc.weight`", part)
        rows = self.shape("lm_head.weight")[0]
        for field in ("draft_vocab_size", "truncated_vocab_size"):
            self.agrees(field, rows, "`lm_head.weight`", self.whole)
        inner = self.shape("midlayer.mlp.gate_proj.weight")[0]
        self.agrees("intermediate_size", inner, "`midlayer.mlp.gate_proj.weight`")
        return {
            "vocab_size": self._vocab_size(rows),
            "draft_vocab_size": rows,
            "hidden_size": width,
            "target_hidden_size": target_width,
            "intermediate_size": inner,
            "feature_layers": layers,
        }

    def _vocab_size(self, rows: int) -> int:
        """Of the target: by `t2d`, the stored embedding or the config, which must agree."""
        if "t2d" in self.tensors:
            size, where = self.shape("t2d", 1)[0], "`t2d`"
        elif self.own_embeddings:
            size, where = self.shape("embed_tokens.weight")[0], "`embed_tokens.weight`"
        else:
            size, where = (rows if self.config.get("vocab_size") is None else self.positive("vocab_size")), ""
        self.agrees("vocab_size", size, where)
        return size

    def _heads(self) -> dict[str, int]:
        """Heads and their width: rows of the projections over the config's number of heads."""
        heads = self.positive("num_attention_heads")
        q_rows, k_rows = (self.shape(f"midlayer.self_attn.{name}_proj.weight")[0] for name in ("q", "k"))
        head_dim = q_rows // heads
        if head_dim * heads != q_rows or not head_dim or k_rows % head_dim:
            raise DraftCheckpointError(
                f"`num_attention_heads={heads}` of `{self.source}` does not divide its projections of {q_rows} and {k_rows} "
                "rows."
            )
        self.agrees("head_dim", head_dim, f"`midlayer.self_attn.q_proj.weight` and `num_attention_heads={heads}`")
        self.agrees("num_key_value_heads", k_rows // head_dim, "`midlayer.self_attn.k_proj.weight`")
        return {"num_attention_heads": heads, "num_key_value_heads": k_rows // head_dim, "head_dim": head_dim}

    def _options(self) -> dict[str, bool]:
        """What the names of the tensors decide."""
        found = {
            "norm_before_fc": "input_norm.weight" in self.tensors,
            "fc_norm": any(name.startswith("fc_norm.") for name in self.tensors),
        }
        for field, there in found.items():
            self.agrees(field, there, "the tensors' names", {field: self.flag(field)})
        return {
            **found,
            "fc_bias": "fc.bias" in self.tensors,
            "attention_bias": "midlayer.self_attn.q_proj.bias" in self.tensors,
            "attention_output_bias": "midlayer.self_attn.o_proj.bias" in self.tensors,
            "mlp_bias": "midlayer.mlp.gate_proj.bias" in self.tensors,
            "qk_norm": "midlayer.self_attn.q_norm.weight" in self.tensors,
        }
