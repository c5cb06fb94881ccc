# SPDX-License-Identifier: Apache-2.0
"""Model cards (level 5)."""

from .card import draft_card


__all__ = ["draft_card"]
