# SPDX-License-Identifier: Apache-2.0
"""Trees as options of a command: `3x3x8,8x10x60`. Level 5."""

from __future__ import annotations

from gto_hf.tree import TreeConfig


def parse_tree(text: str) -> TreeConfig:
    """`"4x6x16"` to a [`TreeConfig`] of depth 4, top-k 6 and 16 nodes."""
    try:
        depth, top_k, nodes = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise ValueError(f"`{text}` is no tree: write depth x top-k x nodes, for example 4x6x16.") from error
    return TreeConfig(depth, top_k, nodes)


def parse_trees(text: str, option: str) -> list[TreeConfig]:
    """Trees of a comma-separated `option`; none of an empty one. Raises `ValueError` for a tree that stands twice."""
    trees = [parse_tree(part) for part in text.split(",")] if text else []
    if len(set(trees)) < len(trees):
        raise ValueError(f"`{option} {text}` names a tree twice.")
    return trees
