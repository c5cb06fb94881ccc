# SPDX-License-Identifier: Apache-2.0
"""
A draft that FSDP2 splits between steps and that is whole within one. Level 6.

FSDP2 gathers parameters in hooks around the forward of modules, and adds up gradients over ranks in the backward of each
such forward. Trees call a draft and its parts as often as they are deep, which differs between ranks, so these hooks would
leave ranks waiting for each other. A draft is small: all of it is gathered once per step, and the hooks rest meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, StateDictType
from torch.distributed.tensor import DTensor, Partial
from trl.trainer.utils import hash_module


def prepare_fsdp(trainer: Any) -> None:
    """
    Refuse what a draft cannot be trained with under FSDP, and set what does not depend on the user.

    A draft is gathered as a whole, so its layers are not wrapped one by one; mixed precision is autocast's, as under DDP.

    Raises:
        ValueError: Names the option, why it does not work, and what to set; also if ranks start from different drafts.
    """
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"GTOTrainer does not run under FSDP{plugin.fsdp_version}, which gathers parameters for gradients only inside the "
            "forward of its modules; trees call parts of a draft outside of it. Set `fsdp_version: 2`, or use DDP."
        )
    refused = {
        "fsdp_state_dict_type: SHARDED_STATE_DICT": (
            plugin.state_dict_type != StateDictType.FULL_STATE_DICT,
            "no checkpoint could be loaded by `from_pretrained`. Set FULL_STATE_DICT; a draft is small",
        ),
        "fsdp_cpu_ram_efficient_loading: true": (
            plugin.cpu_ram_efficient_loading,
            "only the first rank would have the target's weights, but every rank needs all of them. Set it to false",
        ),
        "fsdp_offload_params: true": (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "all of the draft is on the device during a step. Set it to false",
        ),
        "fsdp_activation_checkpointing: true": (
            plugin.activation_checkpointing,
            "it would rename the draft's layers. Set it to false, and the trainer's `activation_checkpointing` to true",
        ),
        f"fsdp_ignored_modules: {plugin.ignored_modules}": (
            plugin.ignored_modules is not None,
            "their gradients would not be averaged over ranks. Unset it; freeze parameters by `requires_grad=False`",
        ),
    }
    for option, (given, reason) in refused.items():
        if given:
            raise ValueError(f"GTOTrainer does not run under FSDP2 with `{option}`: {reason}.")
    # DDP copies the first rank's parameters to the others; FSDP2 would make one draft of pieces of several.
    if len(set(gather_object([hash_module(trainer.model)]))) > 1:
        raise ValueError(
            "The ranks start from different drafts. Load the draft from a folder, or call `transformers.set_seed` with one "
            "number on every rank before making it."
        )
    plugin.auto_wrap_policy = plugin.mixed_precision_policy = None


@contextmanager
def whole(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """
    Within it, a model that FSDP2 has split is an ordinary module with all its parameters. All ranks must enter it.

    Does nothing to other models. Anything may be called any number of times in it, unequally often on each rank.

    Args:
        model (`nn.Module`): Prepared by accelerate.
        gradients (`bool`, *optional*, defaults to `False`): On leaving, average the gradients over ranks and add every
            rank's share to those of its piece. Every rank must have done its backward pass by then.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        yield
        return
    for part in parts:
        part.unshard()
    gathered = list(model.parameters())
    try:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(_without_hooks(part))
            yield
        found = [parameter.grad for parameter in gathered]
    finally:
        for parameter in gathered:  # after an error too: FSDP2 gathers into the same parameters next time
            parameter.grad = None
        for part in parts:
            part.reshard()
    if gradients:
        for grad, piece in zip(found, model.parameters(), strict=True):
            if piece.requires_grad:
                _share_gradient(grad, piece)


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Within it the draft of a trainer is whole, also before any training. All ranks must enter it."""
    if trainer.is_fsdp_enabled and not trainer.accelerator._models:
        # Trainer would have it split, which accelerate does only together with an optimizer.
        trainer.accelerator.prepare_model(trainer.model.to(trainer.accelerator.device), evaluation_mode=True)
    with whole(trainer.model):
        yield


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Set FSDP2's hooks on a module's forward aside, and no others."""
    saved = {name: getattr(module, name) for name in ("_forward_pre_hooks", "_forward_hooks")}
    for name, hooks in saved.items():
        others = {i: hook for i, hook in hooks.items() if not _is_fsdp(hook)}
        setattr(module, name, type(hooks)(others))
    try:
        yield
    finally:
        for name, hooks in saved.items():
            setattr(module, name, hooks)


def _is_fsdp(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def _share_gradient(grad: torch.Tensor | None, piece: nn.Parameter) -> None:
    """Average the gradient of a whole parameter over ranks, and keep what belongs to this rank's piece."""
    mesh = piece.device_mesh
    if grad is None:  # not used by this rank, but perhaps by another
        grad = torch.zeros(piece.shape, dtype=piece.dtype, device=piece.device)
    summed = DTensor.from_local(grad / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    share = summed.redistribute(placements=piece.placements)
    piece.grad = share if piece.grad is None else piece.grad + share


def full(number: Any) -> Any:
    """A number that ranks hold in parts, such as the norm of split gradients; others as they are."""
    return number.full_tensor() if isinstance(number, DTensor) else number
