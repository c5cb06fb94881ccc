# SPDX-License-Identifier: Apache-2.0
"""Trees merged into a trie: nothing lost, nothing twice, nothing that the text already holds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gto_hf.gto.trie import build_trie, chunks
from tests.gto.random_trees import VOCAB, random_trees


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 8), limit=st.integers(1, 12), rows=st.integers(1, 3))
def test_every_path_is_in_the_trie_once(seed, nodes, limit, rows):
    generator = torch.Generator().manual_seed(seed)
    length = 9
    text = torch.randint(0, VOCAB, (rows, length), generator=generator)
    roots = torch.stack([torch.randperm(6, generator=generator)[:3].sort().values + 1 for _ in range(rows)])
    valid = torch.ones(rows, length, dtype=torch.bool)
    valid[0, 7:] = False  # padding is no text
    trees = [random_trees(generator, roots.tolist(), text, nodes) for _ in range(2)]
    keep = torch.rand(rows * 3, generator=generator) < 0.8
    trie = build_trie(trees, roots, keep, text, valid, VOCAB)

    def path(number):
        """(row, text before and on the path) of an id."""
        tokens = []
        while number >= trie.slots:
            tokens.insert(0, int(trie.tokens[number - trie.slots]))
            number = int(trie.parents[number - trie.slots])
        row, slot = divmod(number, length)
        return row, (*text[row, : slot + 1].tolist(), *tokens)

    wanted = set()
    for tree, ids in zip(trees, trie.ids, strict=True):
        for r in range(len(tree.tokens)):
            row, root = r // 3, int(roots[r // 3, r % 3])
            for column in range(nodes + 1):
                if not keep[r]:
                    assert ids[r, column] == row * length + root
                    continue
                own, node = [], column
                while node:
                    own.insert(0, int(tree.tokens[r, node]))
                    node = int(tree.parents[r, node])
                expected = (row, (*text[row, : root + 1].tolist(), *own))
                assert path(int(ids[r, column])) == expected
                if column:
                    wanted.add(expected)
    # once each, and what the text holds not at all
    numbers = range(trie.slots, trie.slots + len(trie.parents))
    paths = [path(n) for n in numbers]
    assert len(set(paths)) == len(paths)
    on_text = {(r, tuple(text[r, :n].tolist())) for r in range(rows) for n in range(1, length + 1) if valid[r, n - 1]}
    assert set(paths) == {w for w in wanted if w not in on_text}
    for i, parent in enumerate(trie.parents.tolist()):
        assert parent < trie.slots + i
        row, whole = paths[i]
        anchor, offset = int(trie.anchors[i]), int(trie.offsets[i])
        assert anchor // length == row and anchor % length + 1 + offset == len(whole)
    check_groups(trie, rows, length, limit)


def check_groups(trie, rows, length, limit):
    """Every node is in one group, with all its ancestors off the text."""
    groups = chunks(trie, rows, limit)
    seen = torch.cat([g[g >= 0] for g in groups]) if groups else torch.empty(0, dtype=torch.long)
    assert seen.sort().values.tolist() == list(range(len(trie.parents)))
    for group in groups:
        for row, members in enumerate(group.tolist()):
            members = [m for m in members if m >= 0]
            tops = {int(trie.tops[m]) for m in members}
            assert len(members) <= limit or len(tops) == 1
            for m in members:
                assert int(trie.anchors[m]) // length == row
                parent = int(trie.parents[m]) - trie.slots
                assert parent < 0 or parent in members  # ancestors share the forward
