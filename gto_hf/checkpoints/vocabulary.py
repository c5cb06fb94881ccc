# SPDX-License-Identifier: Apache-2.0
"""Vocabulary maps of other projects' checkpoints: checked, and completed where a file may leave a part out. Level 3."""

from __future__ import annotations

import torch

from gto_hf.drafts import DraftCheckpointError


def complete_vocabulary(source: str, vocab_size: int, rows: int, tensors: dict[str, torch.Tensor]) -> None:
    """
    Give `tensors` a `d2t` `(rows,)` int64 and a `t2d` `(vocab_size,)` bool, as they are stored or as they must be.

    The order of the head's rows is never changed: `d2t` need not ascend, so it is not made from `t2d`.

    Raises:
        DraftCheckpointError: If a reduced head has no map, or a map has the wrong kind or length.
    """
    if "d2t" not in tensors:
        if rows != vocab_size:
            raise DraftCheckpointError(
                f"`{source}` has a head of {rows} rows for {vocab_size} target tokens but no `d2t` that says which ones."
            )
        tensors["d2t"] = torch.zeros(rows, dtype=torch.long)
    d2t = _whole_numbers(source, "d2t", tensors["d2t"], rows)
    tensors["d2t"] = d2t
    kept = d2t + torch.arange(rows)
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        tensors["t2d"][kept.clamp(0, vocab_size - 1)] = True
        return
    t2d = tensors["t2d"] = _whole_numbers(source, "t2d", tensors["t2d"], vocab_size).bool()
    if (
        rows == vocab_size and not bool(d2t.any()) and not bool(t2d.any())
    ):  # buffers that nobody had to set: all are kept
        t2d.fill_(True)
    absolute = bool(((d2t >= 0) & (d2t < vocab_size)).all()) and bool(t2d[d2t.clamp(0, vocab_size - 1)].all())
    inside = bool(((kept >= 0) & (kept < vocab_size)).all())
    if absolute and len(d2t.unique()) == rows and not (inside and bool(t2d[kept].all())):
        raise DraftCheckpointError(
            f"`d2t` of `{source}` holds target ids themselves, going by `t2d`. It must hold offsets: target id = i + d2t[i]; "
            "subtract `torch.arange(len(d2t))` from it."
        )


def _whole_numbers(source: str, name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The tensor as int64, if it is one of whole numbers or truth values of the right length."""
    if tensor.is_floating_point() or tensor.is_complex() or tuple(tensor.shape) != (size,):
        raise DraftCheckpointError(
            f"`{name}` of `{source}` is {tensor.dtype} of shape {tuple(tensor.shape)}; it must hold {size} whole numbers."
        )
    return tensor.long()
