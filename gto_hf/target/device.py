# SPDX-License-Identifier: Apache-2.0
"""Where a command of the package puts its models. Level 1."""

from __future__ import annotations

import torch


def find_device(name: str | None) -> torch.device:
    """The named device, or an accelerator if there is one, else the CPU; raises `ValueError` if it cannot hold a tensor."""
    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        torch.ones(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"`--device {name}` cannot be used here: {str(error).splitlines()[0]}") from error
