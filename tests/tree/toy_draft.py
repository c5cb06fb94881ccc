# SPDX-License-Identifier: Apache-2.0
"""Drives the tree under test with the toy language model of the slow reference.

A node's output features spell out its whole path, so every call of ``step`` can tell which nodes it was given and
check the ancestors mask against the paths themselves.
"""

import torch

from gto_hf.tree import Expansion, grow_trees


class ToyDraft:
    """The draft side of ``grow_trees``: the root expansion, ``step``, and a record of the calls."""

    def __init__(self, model, contexts, root_tokens, config):
        self.model, self.config = model, config
        self.contexts, self.root_list = list(contexts), list(root_tokens)
        self.root_tokens = torch.tensor(self.root_list)
        self.width = config.depth + 3  # length of the path, then the path itself
        self.depths = []  # the depth argument of every call
        self.seen = [[] for _ in self.root_list]  # per root: the paths of all nodes passed so far
        self.levels = [[] for _ in self.root_list]  # the same, one list per call

    def _encode(self, path):
        return [float(len(path)), *map(float, path), *[-1.0] * (self.width - 1 - len(path))]

    @staticmethod
    def _decode(row):
        return tuple(int(x) for x in row[1 : 1 + int(row[0])])

    def expand(self, paths):
        """The Expansion of the nodes ``paths[root][row]``."""
        k = self.config.top_k
        children = [[self.model.children(path, k) for path in row] for row in paths]
        return Expansion(
            log_probs=torch.tensor([[[lp for lp, _ in kids] for kids in row] for row in children]),
            tokens=torch.tensor([[[token for _, token in kids] for kids in row] for row in children]),
            features=torch.tensor([[self._encode(path) for path in row] for row in paths]),
        )

    def root(self):
        return self.expand([[(c, t)] for c, t in zip(self.contexts, self.root_list, strict=True)])

    def step(self, tokens, features, ancestors, depth):
        roots, k = len(self.root_list), self.config.top_k
        assert tokens.shape == (roots, k)
        assert features.shape == (roots, k, self.width)
        self.depths.append(depth)
        size = k * len(self.depths)
        assert ancestors.dtype == torch.bool
        assert ancestors.shape == (roots, k, size)
        paths = []
        for r in range(roots):
            here = [self._decode(f) + (t,) for f, t in zip(features[r].tolist(), tokens[r].tolist(), strict=True)]
            assert all(len(path) == 2 + depth for path in here), "a node of another level was passed"
            self.seen[r].extend(here)
            self.levels[r].append(here)
            expected = [[path[: len(other)] == other for other in self.seen[r]] for path in here]
            assert ancestors[r].tolist() == expected
            paths.append(here)
        return self.expand(paths)

    def grow(self):
        return grow_trees(self.step, self.root_tokens, self.root(), self.config)


def fields(tree):
    """The four tensors of a tree by name."""
    return {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "scores")}
