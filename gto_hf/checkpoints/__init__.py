# SPDX-License-Identifier: Apache-2.0
"""Reading drafts from any folder or Hub repository (level 3)."""

from .auto import AutoDraft


__all__ = ["AutoDraft"]
