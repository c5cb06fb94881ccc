# SPDX-License-Identifier: Apache-2.0
"""Random trees on random texts over a vocabulary so small that they often repeat each other and the text."""

import torch

from gto_hf.tree import DraftTree


VOCAB = 4


def random_trees(generator, roots, text, nodes):
    """Trees over a tiny vocabulary below the given slots of a text, distinct children, parents before children."""
    tokens, parents, depths = [], [], []
    for b, row in enumerate(roots):
        for root in row:
            made = {}
            t, p, d = [int(text[b, root])], [0], [0]
            while len(t) <= nodes:
                parent = int(torch.randint(0, len(t), (1,), generator=generator))
                token = int(torch.randint(0, VOCAB, (1,), generator=generator))
                if (parent, token) in made:
                    continue
                made[parent, token] = len(t)
                t.append(token), p.append(parent), d.append(d[parent] + 1)
            tokens.append(t), parents.append(p), depths.append(d)
    tensors = [torch.tensor(x) for x in (tokens, parents, depths)]
    return DraftTree(*tensors, torch.zeros_like(tensors[0]).float())
