# SPDX-License-Identifier: Apache-2.0
"""Draft trees and the policy that grows them (level 0: imports torch and nothing else)."""

from .budget import Budget, CostCurve
from .config import TreeConfig
from .policy import Expansion, Growth, Step, grow_trees, stable_topk
from .tree import DraftTree


__all__ = [
    "Budget",
    "CostCurve",
    "DraftTree",
    "Expansion",
    "Growth",
    "Step",
    "TreeConfig",
    "grow_trees",
    "stable_topk",
]
