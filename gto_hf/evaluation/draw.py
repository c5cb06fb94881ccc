# SPDX-License-Identifier: Apache-2.0
"""
One round of decoding as a picture: the tree, what was accepted, where the draft's greedy path was cut. Level 5.

Text for the terminal with rich, files with matplotlib. Both are optional: the extra `draw`.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gto_hf.decoding.trace import RoundTrace
from gto_hf.extras import install_hint

from .misalignment import accepted_columns, node_columns


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text
    from rich.tree import Tree


SUFFIXES = (".svg", ".png", ".pdf")
UNBROKEN = 10_000  # columns: wide enough for every line
FONT = "DejaVu Sans"  # comes with matplotlib
FONT_SIZE = 8  # points
LONGEST_NAME = 14  # characters of a token in a figure
# inches of a figure: a character, a level downwards, a row sideways, title and legend; the widest tree drawn downwards
CHARACTER, LEVEL, ROW, MARGIN, WIDEST = 0.08, 0.75, 0.3, 1.2, 12.0
# what a node is -> (rich style, fill, outline and meaning in a figure)
KINDS = {
    "root": ("bold", "#FFFFFF", "#444444", "root: last known token"),
    "accepted": ("bold green", "#9FE0C8", "#00785A", "accepted"),
    "greedy": ("yellow", "#FBDFA6", "#C98500", "draft's greedy path"),
    "other": ("", "#EEEEEE", "#999999", "other node"),
    "pruned": ("dim", "#FFFFFF", "#C98500", "greedy path, pruned"),
    "bonus": ("bold cyan", "#BBDDF5", "#2A7FB8", "the target's own token"),
}


@dataclass
class _Node:
    """One node of the picture; `draft` and `target` are probabilities, None where there is none."""

    name: str
    kind: str
    draft: float | None = None
    target: float | None = None
    greedy: bool = False
    hidden: int = 0  # nodes below that are left out
    children: list[_Node] = field(default_factory=list)


def draw_tree(
    trace: RoundTrace,
    tokenizer: Any = None,
    *,
    file: str | Path | None = None,
    max_nodes: int | None = None,
    width: int | None = None,
) -> str:
    """
    Draw one round: its draft tree, the accepted path (✓), the draft's greedy path and what was pruned of it.

    Every node shows its token, the draft's probability of it after its parent and the target's. The target's own token
    (the bonus) stands below the last accepted node.

    Args:
        trace ([`RoundTrace`]): The round.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Names the tokens; ids are shown without one.
        file (`str` or `Path`, *optional*): Also draw a figure: `.svg`, `.png` or `.pdf`, by suffix.
        max_nodes (`int`, *optional*): Draw only so many drafted nodes, the best scored. Accepted nodes and those of the
            greedy path are always drawn. All by default.
        width (`int`, *optional*): Columns of the text; longer lines end in an ellipsis. By default no line is cut.

    Returns:
        `str`: The tree as plain text. [`rich_tree`] gives it in colour.

    Raises:
        ImportError: If rich, or for a file matplotlib, is not installed.
        TypeError: If `trace` is no recorded round.
        ValueError: If the suffix of `file` is none of the three, or `max_nodes` is negative.
    """
    if not isinstance(trace, RoundTrace):
        raise TypeError(
            f"`draw_tree` draws one recorded round, got {type(trace).__name__}. Call `generate` inside "
            "`with gto_hf.record_rounds():` and pass one entry of `output.trace`."
        )
    path = None if file is None else Path(file)
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Cannot draw to `file={str(file)!r}`: its name must end in {', '.join(SUFFIXES)}.")
    tree = rich_tree(trace, tokenizer, max_nodes=max_nodes)
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=UNBROKEN if width is None else width,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    console.print(tree)
    if path is not None:
        _write_figure(_picture(trace, tokenizer, max_nodes), _headline(trace, max_nodes), path)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def rich_tree(trace: RoundTrace, tokenizer: Any = None, *, max_nodes: int | None = None) -> Tree:
    """
    The same picture as a `rich.tree.Tree`, for `rich.print` or a console of your own. Arguments as for [`draw_tree`].

    Raises:
        ImportError: If rich is not installed.
        ValueError: If `max_nodes` is negative.
    """
    try:
        from rich.text import Text
        from rich.tree import Tree
    except ImportError as error:
        raise ImportError(f"Drawing a tree needs rich. Install it: {install_hint('draw')}.") from error
    root = _picture(trace, tokenizer, max_nodes)
    head = Text(_headline(trace, max_nodes) + "\n", no_wrap=True, overflow="ellipsis")
    tree = Tree(head + _line(root), guide_style="dim")
    todo = [(root, tree)]
    while todo:
        node, branch = todo.pop()
        todo += [(child, branch.add(_line(child))) for child in node.children]
        if node.hidden:
            branch.add(Text(f"… {node.hidden} more", style="dim", no_wrap=True))
    return tree


def _line(node: _Node) -> Text:
    """What the terminal shows of a node. A `Text`, so that brackets in tokens are no markup."""
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(node.name, style=KINDS[node.kind][0])
    line.append(
        "".join(f"  {who} {p}" for who, p in _probabilities(node)), style="dim" if node.kind == "pruned" else ""
    )
    if node.kind == "root":
        line.append("  root", style="dim")
    elif node.kind == "accepted":
        line.append("  ✓", style="bold green")
    elif node.kind == "bonus":
        line.append("  the target's own", style="cyan")
    if node.greedy:
        line.append("  greedy", style="dim" if node.kind == "pruned" else "yellow")
    if node.kind == "pruned":
        line.append("  pruned", style="dim")
    return line


def _probabilities(node: _Node) -> list[tuple[str, str]]:
    """Who gives this node's token which probability, as text."""
    named = [("draft", node.draft), ("target", node.target)]
    return [(who, _percent(p)) for who, p in named if p is not None]


def _percent(p: float) -> str:
    """A probability with two decimals; tiny ones are not called zero."""
    if math.isnan(p):
        return "-"
    return "<0.01" if 0 < p < 0.005 else f"{p:.2f}"


def _name(token: int, tokenizer: Any) -> str:
    """A token's text with invisible characters spelled out; its id where there is no text to show."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token])
    return f"{text!r} #{token}" if not text or "\ufffd" in text else repr(text)


def _headline(trace: RoundTrace, max_nodes: int | None) -> str:
    """The round in numbers."""
    nodes = trace.tree.tokens.shape[1] - 1
    drawn = len(_drawn(trace, max_nodes)) - 1
    parts = [
        f"known tokens {trace.length}",
        f"nodes {nodes}" if drawn == nodes else f"nodes {nodes} ({drawn} drawn)",
        f"accepted {len(accepted_columns(trace))}",
        f"emitted {len(trace.emitted)}",
    ]
    if trace.greedy:
        parts.append(f"greedy path kept {trace.greedy_kept} of {len(trace.greedy)}")
    return " · ".join(parts)


def _drawn(trace: RoundTrace, max_nodes: int | None) -> set[int]:
    """Columns to draw: root, accepted and greedy nodes, then the best scored until `max_nodes` are there."""
    size = trace.tree.tokens.shape[1]
    if max_nodes is None:
        return set(range(size))
    if max_nodes < 0:
        raise ValueError(f"`max_nodes={max_nodes}` must not be negative.")
    drawn = {0, *accepted_columns(trace), *node_columns(trace.tree, trace.greedy)}
    scores, parents = trace.tree.scores[0].tolist(), trace.tree.parents[0].tolist()
    for column in sorted(range(1, size), key=lambda c: (-scores[c], c)):  # parents first: none scores below its child
        if len(drawn) > max_nodes:
            break
        if parents[column] in drawn:
            drawn.add(column)
    return drawn


def _picture(trace: RoundTrace, tokenizer: Any, max_nodes: int | None) -> _Node:
    """The round as nodes: the tree's, the pruned rest of the greedy path, the target's own token."""
    tokens, parents = trace.tree.tokens[0].tolist(), trace.tree.parents[0].tolist()
    scores, target = trace.tree.scores[0].tolist(), trace.target_log_probs.tolist()
    accepted, greedy = accepted_columns(trace), node_columns(trace.tree, trace.greedy)
    drawn = _drawn(trace, max_nodes)
    root = _Node(_name(tokens[0], tokenizer), "root")
    shown = [root]  # the node that stands for each column: itself, or the closest one drawn above it
    for column in range(1, len(tokens)):
        parent = shown[parents[column]]
        if column not in drawn:
            parent.hidden += 1
            shown.append(parent)
            continue
        node = _Node(
            _name(tokens[column], tokenizer),
            "accepted" if column in accepted else "greedy" if column in greedy else "other",
            math.exp(scores[column] - scores[parents[column]]),
            math.exp(target[column]),
            column in greedy,
        )
        parent.children.append(node)
        shown.append(node)
    node = shown[greedy[-1]] if greedy else root
    kept = len(greedy)
    for token, log_prob in zip(trace.greedy[kept:], trace.greedy_log_probs[kept:], strict=True):
        rest = _Node(_name(token, tokenizer), "pruned", math.exp(log_prob), greedy=True)
        node.children.append(rest)
        node = rest
    if len(trace.emitted) > len(accepted):
        last = shown[accepted[-1]] if accepted else root
        last.children.append(_Node(_name(trace.emitted[len(accepted)], tokenizer), "bonus"))
    return root


def _preorder(root: _Node) -> list[tuple[_Node, int]]:
    """All nodes with their depths, parents before children."""
    order, todo = [], [(root, 0)]
    while todo:
        node, depth = todo.pop()
        order.append((node, depth))
        todo += [(child, depth + 1) for child in reversed(node.children)]
    return order


def _places(root: _Node) -> dict[int, tuple[float, int]]:
    """
    `id(node)` -> (column, depth). Subtrees stand side by side in order, as close as their levels allow, with nodes of a
    level at least one column apart and every parent in the middle of its children.
    """
    order = _preorder(root)
    offset: dict[int, float] = {id(root): 0.0}  # of a node from its parent
    edges: dict[int, tuple[list[float], list[float]]] = {}  # leftmost and rightmost column of each level of a subtree
    for node, _ in reversed(order):
        left: list[float] = []
        right: list[float] = []
        for child in node.children:
            child_left, child_right = edges.pop(id(child))
            shift = max((r + 1 - c for r, c in zip(right, child_left, strict=False)), default=0.0)
            offset[id(child)] = shift
            left += [c + shift for c in child_left[len(left) :]]
            right = [c + shift for c in child_right] + right[len(child_right) :]
        if node.children:
            middle = (offset[id(node.children[0])] + offset[id(node.children[-1])]) / 2
            for child in node.children:
                offset[id(child)] -= middle
            left, right = [c - middle for c in left], [c - middle for c in right]
        edges[id(node)] = ([0.0, *left], [0.0, *right])
    places = {id(root): (-min(edges[id(root)][0]), 0)}
    for node, depth in order:
        for child in node.children:
            places[id(child)] = (places[id(node)][0] + offset[id(child)], depth + 1)
    return places


def _write_figure(root: _Node, title: str, path: Path) -> None:
    """Draw to a file with matplotlib, without a display."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ImportError(f"Drawing to a file needs matplotlib. Install it: {install_hint('draw')}.") from error
    kind = path.suffix.lower()[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gto-hf"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # an SVG's viewer has other fonts
        figure = _figure(root, title, escape=kind != "svg")
        figure.savefig(path, format=kind, dpi=150, bbox_inches="tight", metadata=undated)


def _figure(root: _Node, title: str, escape: bool) -> Figure:
    """
    The tree from top to bottom, or from left to right if it would be wider than `WIDEST`.

    With `escape`, characters that the font lacks are spelled out.
    """
    from matplotlib.figure import Figure

    places = _places(root)
    columns = max(x for x, _ in places.values()) + 1
    levels = max(depth for _, depth in places.values()) + 1
    nodes = [node for node, _ in _preorder(root)]
    labels, longest = _labels(nodes, "\n", escape)
    width, height = columns * (CHARACTER * longest + 0.2), LEVEL * levels
    sideways = width > WIDEST
    if sideways:
        labels, longest = _labels(nodes, "  ", escape)
        width, height = levels * (CHARACTER * longest + 0.4), ROW * columns
        places = {key: (depth, x) for key, (x, depth) in places.items()}
    figure = Figure(figsize=(max(7.0, width), height + MARGIN))
    below = MARGIN / 2 / (height + MARGIN)
    axes = figure.add_axes((0.0, below, 1.0, 1 - 2 * below))
    axes.set_axis_off()
    axes.set_xlim(-0.5, (levels if sideways else columns) - 0.5)
    axes.set_ylim((columns if sideways else levels) - 0.5, -0.5)
    for node in nodes:
        x, y = places[id(node)]
        for child in node.children:
            cx, cy = places[id(child)]
            axes.plot([x, cx], [y, cy], zorder=1, **_edge(child))
        axes.text(
            x, y, labels[id(node)], ha="center", va="center", fontsize=FONT_SIZE, fontfamily=FONT, parse_math=False,
            color="#666666" if node.kind == "pruned" else "#000000", bbox=_box(node), zorder=2,
        )  # fmt: skip
    axes.set_title(title, fontsize=FONT_SIZE + 1, fontfamily=FONT, parse_math=False)
    figure.legend(
        handles=_legend({node.kind for node in nodes}), loc="upper center", bbox_to_anchor=(0.5, below),
        ncols=6 if width > 11 else 3, frameon=False, prop={"family": FONT, "size": FONT_SIZE},
        title="first number: the draft's probability after the parent, second: the target's", title_fontsize=FONT_SIZE,
    )  # fmt: skip
    return figure


def _edge(child: _Node) -> dict[str, Any]:
    """Line to a node: thick on the accepted and the greedy path, broken where it was pruned."""
    return {
        "color": KINDS[child.kind][2],
        "linewidth": 1.8 if child.greedy or child.kind == "accepted" else 0.8,
        "linestyle": "--" if child.kind == "pruned" else "-",
    }


def _box(node: _Node) -> dict[str, Any]:
    """Fill and outline of a node; an accepted node of the greedy path has the greedy path's outline."""
    _, fill, outline, _ = KINDS[node.kind]
    if node.greedy:
        outline = KINDS["greedy"][2]
    box = {"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": outline}
    return box | {"linewidth": 1.6 if node.greedy else 0.8, "linestyle": "--" if node.kind == "pruned" else "-"}


def _legend(kinds: set[str]) -> list[Any]:
    """One patch for each kind of node that occurs."""
    from matplotlib.patches import Patch

    patches = []
    for kind, (_, fill, outline, meaning) in KINDS.items():
        if kind in kinds or kind == "greedy" and kinds & {"accepted", "pruned"}:
            style = "--" if kind == "pruned" else "-"
            patches.append(Patch(facecolor=fill, edgecolor=outline, linestyle=style, label=meaning))
    return patches


def _labels(nodes: list[_Node], between: str, escape: bool) -> tuple[dict[int, str], int]:
    """`id(node)` -> token (✓ if accepted) and probabilities, with `between` in between; characters of the longest line."""
    labels = {}
    for node in nodes:
        name = _in_font(node.name) if escape else node.name
        name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        parts = [f"{name} ✓" if node.kind == "accepted" else name, *(p for _, p in _probabilities(node))]
        labels[id(node)] = between.join(parts)
    return labels, max(len(line) for label in labels.values() for line in label.split("\n"))


def _in_font(text: str) -> str:
    """`text` with the characters that the font cannot draw as escapes."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    return "".join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in text)
