# SPDX-License-Identifier: Apache-2.0
"""The door through which every draft comes in. Level 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from gto_hf.drafts import DRAFTS, DraftCheckpointError, DraftConfig, DraftModel, check_loaded, check_values
from gto_hf.target import fingerprint
from gto_hf.tree import TreeConfig

from .adapters import base_name, is_adapter, merge_adapter
from .dialects import find_dialect
from .files import check_stored, lasting_name, read_config, read_tensors


_HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download", "subfolder")


class AutoDraft:
    """Loads a draft of any known type and layout with [`AutoDraft.from_pretrained`]; not to be instantiated."""

    def __init__(self) -> None:
        raise TypeError("Use `AutoDraft.from_pretrained(...)`.")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        target: nn.Module | None = None,
        tree: TreeConfig | None = None,
        feature_layers: list[int] | tuple[int, ...] | None = None,
        dtype: torch.dtype | str | None = None,
        base: str | PathLike | DraftModel | None = None,
        norm_output: bool | None = None,
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> DraftModel:
        """
        Load a draft saved by gto-hf, one in another project's spelling (docs/dialects.md has them all), or a PEFT adapter on
        one of these: its base draft is loaded and the adapter merged into it.

        Every tensor must be known and of the right shape, and none may be missing. What another project's files leave open
        is decided by its own rules, and `config.source` says how; what only a human can know is an argument.

        Args:
            pretrained_model_name_or_path (`str`): Folder or Hub id.
            target (`PreTrainedModel`, *optional*): Checked for fit and attached; also tells a published checkpoint's
                feature layers.
            tree ([`TreeConfig`], *optional*): Replaces the stored decoding tree.
            feature_layers (`list[int]`, *optional*): Indices into the target's `hidden_states`, for checkpoints that do
                not say.
            dtype (`torch.dtype`, *optional*): Of the weights; defaults to the stored one.
            base (`str` or [`DraftModel`], *optional*): For an adapter, the draft to put it on (a model is changed);
                defaults to the one its `adapter_config.json` names.
            norm_output (`bool`, *optional*): For EAGLE-3 checkpoints of other projects: whether the fed-back feature is normed
                (see [`DraftConfig`]). Asked for where the files do not decide it.
            rope_parameters (`dict`, *optional*): For EAGLE-3 checkpoints of other projects: the rotary parameters that the
                draft was trained with, in place of what its files say.
            **kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, `subfolder`; for drafts saved
                by gto-hf also what `PreTrainedModel.from_pretrained` takes.

        Returns:
            [`DraftModel`] in evaluation mode.

        Raises:
            DraftCheckpointError: If it is not a complete draft; names tensors and fields.
        """
        source = str(pretrained_model_name_or_path)
        facts = kwargs.pop("_target_facts", None)  # of a target of which only the config is at hand
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        config = read_config(source, **hub)
        if config["_commit_hash"] is not None:  # config and weights of one commit, whatever is pushed in between
            hub["revision"] = kwargs["revision"] = config["_commit_hash"]
        said = {"norm_output": norm_output, "rope_parameters": rope_parameters}
        said = {name: value for name, value in said.items() if value is not None}
        if is_adapter(config):
            options = {**said, "target": target, "tree": tree, "feature_layers": feature_layers, **kwargs}
            options |= {} if facts is None else {"_target_facts": facts}
            draft = merge_adapter(source, cls._base(source, config, base, options), **hub)
            draft = draft if dtype in (None, "auto") else draft.to(_dtype(dtype))
            return cls._named(draft, source, config["_commit_hash"])
        if base is not None:
            raise ValueError(f"`{source}` is a whole draft, so it takes no `base=`; only an adapter does.")
        if config.get("model_type") == DraftConfig.model_type:
            kind = config.get("draft_type")
            if kind not in DRAFTS:
                raise DraftCheckpointError(
                    f"`{source}` is a draft of type {kind!r}; this gto-hf knows {', '.join(DRAFTS)}. Upgrade gto-hf."
                )
            if feature_layers is not None and list(feature_layers) != config.get("feature_layers"):
                raise ValueError(
                    f"`{source}` says `feature_layers={config.get('feature_layers')}`; do not override them."
                )
            if said:
                raise ValueError(f"`{source}` was saved by gto-hf and says all of itself; leave out {sorted(said)}.")
            draft = cls._own(source, config, {**({"dtype": dtype} if dtype else {}), **kwargs}, hub)
        else:
            unknown = sorted(set(kwargs) - set(hub))
            if unknown:
                raise TypeError(f"Arguments {unknown} are not available for checkpoints of other projects.")
            facts = facts if target is None else fingerprint(target)
            draft = cls._foreign(source, {**config, "_said": said}, facts, feature_layers, dtype, hub)
            if target is not None:
                draft.share_embedding(target)
        if tree is not None:
            draft.tree = tree
        cls._named(draft, source, config["_commit_hash"])
        return draft if target is None else draft.attach(target)

    @staticmethod
    def _named(draft: DraftModel, source: str, commit: str | None) -> DraftModel:
        """The draft, knowing where it came from: adapters that are trained on it name it (PEFT reads `name_or_path`)."""
        name, revision = lasting_name(source, commit)
        draft.name_or_path = draft.config.name_or_path = name
        draft.config._commit_hash = revision
        return draft

    @classmethod
    def _base(cls, source: str, config: dict[str, Any], base: Any, options: dict[str, Any]) -> DraftModel:
        """The draft that an adapter belongs on: the given one, or the one that the adapter names."""
        if isinstance(base, DraftModel):
            if options["tree"] is not None:
                base.tree = options["tree"]
            return base if options["target"] is None else base.attach(options["target"])
        name = base_name(source, config) if base is None else str(base)
        own = ("revision", "subfolder")  # of the adapter's repository, not of the base's
        options = {key: value for key, value in options.items() if key not in own}
        if base is None and config.get("revision"):
            options["revision"] = config["revision"]
        try:
            return cls.from_pretrained(name, **options)
        except (OSError, DraftCheckpointError) as error:
            raise DraftCheckpointError(
                f"The base draft `{name}` of the adapter `{source}` cannot be loaded: {error} Pass the base draft or its "
                "path as `base=`."
            ) from error

    @staticmethod
    def _own(source: str, config: dict[str, Any], kwargs: dict[str, Any], hub: dict[str, Any]) -> DraftModel:
        """A draft that gto-hf saved; its files are looked at before anything is loaded."""
        try:
            stated = DraftConfig.from_dict({k: v for k, v in config.items() if k != "_commit_hash"})
            with torch.device("meta"):  # an activation or a rotary embedding that there is not
                DRAFTS[config["draft_type"]](stated)
        except (ValueError, TypeError, AttributeError, LookupError, StrictDataclassError) as error:
            raise DraftCheckpointError(f"`config.json` of `{source}` describes no draft: {error}") from error
        if "variant" not in kwargs:  # files of other names
            check_stored(source, **hub)
        try:
            return DRAFTS[config["draft_type"]].from_pretrained(source, **kwargs)
        except (UnpicklingError, SafetensorError, EOFError) as error:
            raise DraftCheckpointError(
                f"The weights of `{source}` cannot be read as plain tensors: {error}"
            ) from error

    @staticmethod
    def _foreign(
        source: str,
        config: dict[str, Any],
        found: dict[str, Any] | None,
        feature_layers: list[int] | tuple[int, ...] | None,
        dtype: torch.dtype | str | None,
        hub: dict[str, Any],
    ) -> DraftModel:
        """A draft from another project's layout; `found` is the fingerprint of its target, where it is known."""
        tensors = read_tensors(source, **hub)
        dtype = dtype if dtype in (None, "auto") else _dtype(dtype)
        with _blamed_on_config(source):
            made, state = find_dialect(source, config, tensors).read(
                source,
                config,
                tensors,
                feature_layers=None if feature_layers is None else list(feature_layers),
                target_layers=None if found is None else found["num_hidden_layers"],
            )
        if config["_said"] and made.draft_type != "eagle3":
            raise ValueError(f"`{source}` is a draft of type {made.draft_type}; leave out {sorted(config['_said'])}.")
        made.target = found
        with _blamed_on_config(source):
            return _filled(source, made, state, dtype)


@contextmanager
def _blamed_on_config(source: str) -> Iterator[None]:
    """What goes wrong in here is a text where a number belongs, a rotary scaling without its factor, and the like."""
    try:
        yield
    except DraftCheckpointError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, StrictDataclassError) as error:
        raise DraftCheckpointError(
            f"`config.json` of `{source}`, or what an argument says in its place, lacks a field or has one of the wrong kind: "
            f"{error!r}"
        ) from error


def _filled(
    source: str, config: DraftConfig, state: dict[str, torch.Tensor], dtype: torch.dtype | str | None
) -> DraftModel:
    """
    The draft with these tensors, each of which must have its place and its shape.

    Args:
        state (`dict[str, torch.Tensor]`): In our names.
        dtype (`torch.dtype`, *optional*): Of the weights; defaults to what most numbers are stored in.

    Raises:
        DraftCheckpointError: Names the tensors that are missing, left over, misshapen or no numbers.
    """
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in state.items():
        if name in ("d2t", "t2d"):
            continue
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise DraftCheckpointError(
                f"`{name}` of `{source}` is stored as {tensor.dtype}, which is no weight that can be read. Quantized drafts "
                "are not supported; fetch the original one."
            )
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    if len(sizes) > 1 and config.source is not None and dtype in (None, "auto"):
        config.source["decisions"].append(f"weights are stored in {len(sizes)} dtypes: that of most is taken")
    draft = DRAFTS[config.draft_type](config).to(max(sizes, key=sizes.get) if dtype in (None, "auto") else dtype)
    own = draft.state_dict()
    check_loaded(source, set(own) - set(state), set(state) - set(own))
    wrong = [
        f"`{k}` {tuple(v.shape)} instead of {tuple(own[k].shape)}" for k, v in state.items() if v.shape != own[k].shape
    ]
    if wrong:
        raise DraftCheckpointError(f"`{source}` has tensors of the wrong shape: {', '.join(wrong[:5])}.")
    for parameter in draft.parameters():  # what would not be loaded cannot pass as loaded
        torch.nn.init.constant_(parameter, torch.nan)
    draft.load_state_dict(state, strict=True)
    check_values(source, draft)
    return draft.eval()


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    made = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(made, torch.dtype) or not made.is_floating_point:
        raise ValueError(f"`dtype={dtype!r}` is no floating-point dtype of PyTorch.")
    return made
