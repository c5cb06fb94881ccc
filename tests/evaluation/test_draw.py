# SPDX-License-Identifier: Apache-2.0
"""Trees as text and as files: what every node says, and that nothing in a token can break the picture."""

import io
import math
import sys
import warnings
from xml.etree import ElementTree

import pytest
import torch

from gto_hf.decoding.trace import RoundTrace
from gto_hf.evaluation.draw import _picture, _places, _preorder, draw_tree, rich_tree
from gto_hf.tree import DraftTree
from tests.tiny import tiny_tokenizer


pytest.importorskip("rich")
WORDS = ["The", " cat", " sat", " on", "\n", " mat", "[red]", "$x$", "日本", "<b>&", " dog", "", "\ufffd", " was"]


class Words:
    """A tokenizer of the words above."""

    def decode(self, ids):
        (token,) = ids
        return WORDS[token]


def make_trace(tokens, parents, probabilities, target, path, emitted, greedy, greedy_probabilities):
    """A round whose nodes have these conditional probabilities."""
    scores, depths = [0.0], [0]
    for column in range(1, len(tokens)):
        scores.append(scores[parents[column]] + math.log(probabilities[column]))
        depths.append(depths[parents[column]] + 1)
    tree = DraftTree(*(torch.tensor([row]) for row in (tokens, parents, depths, scores)))
    logs = [math.log(p) for p in greedy_probabilities]
    return RoundTrace(0, 12, tree, torch.tensor(target).log(), path, emitted, greedy, logs)


@pytest.fixture
def trace():
    """`The` with ` cat` ( ` sat`, ` was`) and ` dog`; greedy ` cat sat`, then pruned; accepted ` cat was`, bonus `\\n`."""
    return make_trace(
        [0, 1, 10, 2, 13],
        [0, 0, 0, 1, 1],
        [1, 0.5, 0.25, 0.75, 0.125],
        [1.0, 0.6, 0.3, 0.001, 0.9],
        [0, 1, 4],
        [1, 13, 4],
        [1, 2, 3, 5],
        [0.5, 0.75, 0.4, 0.35],
    )


def test_every_node_line_by_line(trace):
    assert draw_tree(trace, Words()).splitlines() == [
        "known tokens 12 · nodes 4 · accepted 2 · emitted 3 · greedy path kept 2 of 4",
        "'The'  root",
        "├── ' cat'  draft 0.50  target 0.60  ✓  greedy",
        "│   ├── ' sat'  draft 0.75  target <0.01  greedy",
        "│   │   └── ' on'  draft 0.40  greedy  pruned",
        "│   │       └── ' mat'  draft 0.35  greedy  pruned",
        "│   └── ' was'  draft 0.12  target 0.90  ✓",
        "│       └── '\\n'  the target's own",
        "└── ' dog'  draft 0.25  target 0.30",
    ]


def test_ids_without_a_tokenizer_and_text_with_a_real_one(trace):
    plain = draw_tree(trace).splitlines()
    assert plain[1] == "0  root" and plain[2].startswith("├── 1  draft 0.50") and "'" not in plain[2]
    assert "└── 4  the target's own" in draw_tree(trace)
    named = draw_tree(trace, tiny_tokenizer())
    assert "'<s>'  draft 0.50" in named and "'('  draft 0.25" in named


def test_root_only_round_shows_the_targets_own_token():
    bare = RoundTrace(0, 3, DraftTree.root_only(torch.tensor([0])), torch.zeros(1), [0], [1], [], [])
    assert draw_tree(bare, Words()).splitlines() == [
        "known tokens 3 · nodes 0 · accepted 0 · emitted 1",
        "'The'  root",
        "└── ' cat'  the target's own",
    ]


def test_a_path_pruned_at_the_root_hangs_there():
    lost = make_trace([0, 1], [0, 0], [1, 0.2], [1.0, 0.9], [0, 1], [1, 2], [10, 5], [0.3, 0.9])
    lines = draw_tree(lost, Words()).splitlines()
    assert lines[0].endswith("greedy path kept 0 of 2")
    assert "└── ' dog'  draft 0.30  greedy  pruned" in lines
    assert "    └── ' mat'  draft 0.90  greedy  pruned" in lines


@pytest.mark.parametrize("path", [[0], [0, 1]])
def test_a_round_cut_on_a_drafted_token_has_no_bonus(path):
    cut = make_trace([0, 1], [0, 0], [1, 0.2], [1.0, 0.9], path, [1], [1], [0.2])
    text = draw_tree(cut, Words())
    assert "accepted 1 · emitted 1" in text and "target's own" not in text and "✓" in text


def test_special_tokens_are_neither_markup_nor_line_breaks():
    ids = [4, 6, 7, 8, 9, 11, 12]
    special = make_trace(ids, [0] * 7, [1] + [0.1] * 6, [1.0] + [0.1] * 6, [0], [1], [6], [0.1])
    text = draw_tree(special, Words())
    assert len(text.splitlines()) == 1 + 7 + 1
    for shown in ("'\\n'  root", "'[red]'  draft", "'$x$'", "'日本'", "'<b>&'", "'' #11", "'\ufffd' #12"):
        assert shown in text


def test_impossible_nodes_do_not_break_the_picture(trace):
    trace.tree.scores[0, 1] = trace.tree.scores[0, 4] = -math.inf
    trace.target_log_probs[2] = -math.inf
    text = draw_tree(trace, Words())
    assert "' cat'  draft 0.00" in text and "' was'  draft -" in text and "' dog'  draft 0.25  target 0.00" in text


def test_colour_comes_from_the_rich_tree(trace):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", width=100).print(rich_tree(trace, Words()))
    assert "\x1b[1;32m' cat'" in out.getvalue()
    assert "\x1b" not in draw_tree(trace, Words())


def test_width_cuts_lines_instead_of_wrapping_them(trace):
    full, cut = draw_tree(trace, Words()).splitlines(), draw_tree(trace, Words(), width=30).splitlines()
    assert len(full) == len(cut) and max(map(len, cut)) == 30
    assert any(line.endswith("…") for line in cut)


def test_max_nodes_keeps_both_paths_and_counts_the_rest(trace):
    text = draw_tree(trace, Words(), max_nodes=0)
    assert "nodes 4 (3 drawn)" in text and "dog" not in text and "└── … 1 more" in text
    for word in ("cat", "sat", "was", "mat"):
        assert word in text
    assert draw_tree(trace, Words(), max_nodes=4) == draw_tree(trace, Words())
    with pytest.raises(ValueError, match="max_nodes=-1"):
        draw_tree(trace, max_nodes=-1)


def big_trace(leaves=4):
    """60 nodes, 8 levels deep: a chain of 8, each with side branches."""
    tokens, parents, first = [0], [0], 0
    for level in range(8):
        parent, first = first, len(tokens)
        for _ in range(7 + (level < leaves)):
            tokens.append(len(tokens))
            parents.append(parent)
    size = len(tokens)
    return make_trace(tokens, parents, [0.1] * size, [0.5] * size, [0, 1], [1, 99], [1, 2000], [0.1, 0.1])


def test_nodes_of_a_level_never_overlap_and_parents_stand_in_the_middle():
    root = _picture(big_trace(), None, None)
    places, levels = _places(root), {}
    for node, depth in _preorder(root):
        x, y = places[id(node)]
        assert y == depth
        levels.setdefault(depth, []).append(x)
        if node.children:
            ends = [places[id(child)][0] for child in (node.children[0], node.children[-1])]
            assert x == pytest.approx(sum(ends) / 2)
    assert len(levels) == 9 and sum(map(len, levels.values())) == 63
    for columns in levels.values():
        assert all(b - a > 1 - 1e-9 for a, b in zip(columns, columns[1:], strict=False))
    assert min(min(c) for c in levels.values()) == pytest.approx(0)


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")])
def test_files_are_written(trace, tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"tree{suffix}"
    assert draw_tree(trace, Words(), file=path) == draw_tree(trace, Words())
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 2000


def test_svg_holds_the_text_and_is_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    special = make_trace(
        [0, 6, 7, 8, 9], [0] * 5, [1] + [0.1] * 4, [1.0] + [0.2] * 4, [0], [4], [6, 2], [0.1, 0.3]
    )  # fmt: skip
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (first, second):
            draw_tree(special, Words(), file=str(path))
    assert first.read_bytes() == second.read_bytes()
    text = "\n".join(ElementTree.parse(first).getroot().itertext())
    for shown in ("'[red]'", "'$x$'", "'日本'", "'<b>&'", "'\\n'", "' sat'", "0.10", "0.20", "0.30", "pruned"):
        assert shown in text


def test_characters_without_a_glyph_are_spelled_out_in_images(tmp_path):
    pytest.importorskip("matplotlib")
    special = make_trace([0, 8], [0, 0], [1, 0.1], [1.0, 0.2], [0], [4], [8], [0.1])
    from gto_hf.evaluation.draw import _in_font

    assert _in_font("'日é✓…'") == "'\\u65e5é✓…'"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_tree(special, Words(), file=tmp_path / "a.png")


def test_large_trees_get_large_figures(trace, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    draw_tree(trace, file=tmp_path / "small.png")
    draw_tree(big_trace(), file=tmp_path / "big.png")
    small, big = (image.imread(tmp_path / name).shape for name in ("small.png", "big.png"))
    assert big[0] > 1.5 * small[0] and big[1] > 1.5 * small[1]


@pytest.mark.parametrize("name", ["tree.jpg", "tree", "svg"])
def test_other_suffixes_are_refused_before_anything_is_written(trace, tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in \.svg, \.png, \.pdf"):
        draw_tree(trace, file=tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing, file", [("rich.tree", None), ("matplotlib", "tree.svg")])
def test_missing_packages_are_named(trace, tmp_path, monkeypatch, missing, file):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install .*\[draw\]"):
        draw_tree(trace, file=file and tmp_path / file)
