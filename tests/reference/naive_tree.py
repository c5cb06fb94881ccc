# SPDX-License-Identifier: Apache-2.0
"""A slow draft tree in plain Python: the EAGLE-2 policy, one root at a time.

Nothing here is shared with the package under test. A path is a tuple whose first entry is the root's context
(any integer that stands for "everything before the root") and whose second entry is the root token.
"""

from hashlib import blake2b


MAX_VOCAB = 32


class ToyModel:
    """A path-dependent language model made of hashes.

    ``levels=None`` gives fine log-probabilities (multiples of 1/4096 in (-16, 0]). ``levels=n`` gives only the n
    values 0, -1/2, -1, .., so that ties are everywhere and 0.0 itself occurs; ``levels=1`` makes every score 0.0.
    ``impossible=True`` turns about one token in five into -inf. Apart from that, all sums over a path are exact in
    float32, so a float32 implementation and this file must agree on every tie. The values are not normalised.
    """

    def __init__(self, seed, vocab, levels=None, impossible=False):
        assert 1 <= vocab <= MAX_VOCAB
        self.seed, self.vocab, self.levels, self.impossible = seed, vocab, levels, impossible
        self.cache = {}

    def log_probs(self, path):
        """The log-probability of every token after ``path``."""
        if path not in self.cache:
            digest = blake2b(repr((self.seed, path)).encode(), digest_size=2 * self.vocab).digest()
            row = []
            for token in range(self.vocab):
                number = int.from_bytes(digest[2 * token : 2 * token + 2], "big")
                value = -number / 4096 if self.levels is None else -(number % self.levels) / 2
                if self.impossible and number // 8 % 5 == 0:
                    value = float("-inf")
                row.append(value + 0.0)  # "+ 0.0" turns -0.0 into 0.0
            self.cache[path] = row
        return self.cache[path]

    def children(self, path, k):
        """The k best (log-probability, token) pairs after ``path``, best first, equal ones by lowest token."""
        row = self.log_probs(path)
        best = sorted(range(self.vocab), key=lambda token: (-row[token], token))[:k]
        return [(row[token], token) for token in best]


def naive_tree(model, context, root_token, depth, top_k, total_tokens):
    """The kept tree as a dict of lists: tokens, parents, depths, scores and paths; entry 0 is the root."""
    root = {"path": (context, root_token), "score": 0.0, "depth": 0, "parent": None}
    candidates = []
    frontier = [root]
    for level in range(1, depth + 1):
        scored = []
        for node in frontier:
            for log_prob, token in model.children(node["path"], top_k):
                scored.append(
                    {
                        "path": node["path"] + (token,),
                        "score": node["score"] + log_prob,
                        "depth": level,
                        "parent": node,
                    }
                )
        candidates.extend(scored)
        order = sorted(range(len(scored)), key=lambda i: (-scored[i]["score"], i))
        frontier = [scored[i] for i in order[:top_k]]

    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i]["score"], i))
    kept = [root] + [candidates[i] for i in sorted(order[:total_tokens])]
    column = {node["path"]: i for i, node in enumerate(kept)}
    return {
        "tokens": [node["path"][-1] for node in kept],
        "parents": [0] + [column[node["parent"]["path"]] for node in kept[1:]],
        "depths": [node["depth"] for node in kept],
        "scores": [node["score"] for node in kept],
        "paths": [node["path"] for node in kept],
    }


def naive_frontiers(model, context, root_token, depth, top_k):
    """The paths that are expanded at depths 1, 2, .., depth - 1, in the order in which they are expanded."""
    frontier = [((context, root_token), 0.0)]
    levels = []
    for _ in range(1, depth):
        scored = []
        for path, score in frontier:
            for log_prob, token in model.children(path, top_k):
                scored.append((path + (token,), score + log_prob))
        order = sorted(range(len(scored)), key=lambda i: (-scored[i][1], i))
        frontier = [scored[i] for i in order[:top_k]]
        levels.append([path for path, _ in frontier])
    return levels


def naive_ancestor_mask(parents):
    """mask[i][j] is true when j is node i itself or stands on the way from i up to the root (column 0)."""
    mask = []
    for i in range(len(parents)):
        row = [False] * len(parents)
        at = i
        row[at] = True
        while at != 0:
            at = parents[at]
            row[at] = True
        mask.append(row)
    return mask


def naive_leaves(parents):
    """True for every node that is nobody's parent; the root does not count as its own child."""
    return [all(parents[j] != i for j in range(1, len(parents))) for i in range(len(parents))]


def naive_accepted(tokens, parents, choices):
    """Walk from the root: go to the child that carries the chosen token, stop when there is none."""
    on_path = [False] * len(tokens)
    at = 0
    while at is not None:
        on_path[at] = True
        here, at = at, None
        for child in range(1, len(tokens)):
            if parents[child] == here and tokens[child] == choices[here]:
                at = child
    return on_path
