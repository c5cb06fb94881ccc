# SPDX-License-Identifier: Apache-2.0
"""
How far a draft's greedy path is from the tree it decodes with, counted over recorded rounds. Level 5.

The mismatch that Group Tree Optimization (https://huggingface.co/papers/2509.22134, Fig. 2) starts from: drafts are
trained on one greedy path, but decode with a tree that may not even contain that path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gto_hf.decoding.trace import RoundTrace
from gto_hf.tree import DraftTree


@dataclass(frozen=True)
class Misalignment:
    """
    The four numbers of Group Tree Optimization, Fig. 2 (https://huggingface.co/papers/2509.22134), over some rounds.

    The greedy path is what the draft would write on its own, its likeliest token each time. It is drafted to the full
    depth of the round's tree, before pruning. Lengths count drafted tokens: neither root nor bonus token.

    Attributes:
        rounds (`int`): Rounds counted. With none, all other numbers are NaN.
        pruned (`float`): Share of rounds whose greedy path was not wholly kept in the tree, 0 to 1.
        greedy_accepted_path (`float`): Share of rounds whose accepted tokens are the first of the greedy path, 0 to 1.
            A round that accepts nothing counts, as does one without a draft.
        greedy_accepted (`float`): Mean length that the greedy path alone would have had accepted at the same places of
            the same text: how far it agrees with what was written after the root.
        tree_accepted (`float`): Mean length that the tree had accepted.
    """

    rounds: int
    pruned: float
    greedy_accepted_path: float
    greedy_accepted: float
    tree_accepted: float


def node_columns(tree: DraftTree, tokens: list[int]) -> list[int]:
    """Columns of the nodes of a one-row `tree` that spell the start of `tokens` below the root, as far as it goes."""
    ids, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    child = {(parents[column], ids[column]): column for column in range(1, len(ids))}
    node, columns = 0, []
    for token in tokens:
        node = child.get((node, token), 0)
        if node == 0:
            break
        columns.append(node)
    return columns


def accepted_columns(trace: RoundTrace) -> list[int]:
    """
    Columns of the drafted nodes that a round emitted, top down, without the root.

    Read from the emitted tokens, since a stop rule may end a round on a drafted token as well as on a bonus token. A
    bonus token is never a child of the last accepted node.
    """
    return node_columns(trace.tree, trace.emitted)


def misalignment(rounds: list[RoundTrace], texts: Mapping[int, list[int]] | None = None) -> Misalignment:
    """
    Compare the draft's greedy path with its tree, round by round. See [`Misalignment`] for the definitions.

    The text after a root is pieced together from the tokens that this and the row's following rounds emitted. A round
    that does not continue the row's round before it (another length, another root) starts a new `generate` call, and no
    text runs over from one call into the next. At the end of a text both lengths are cut by the same end.

    Args:
        rounds (`list[RoundTrace]`): In the order they were recorded; rows and calls may be mixed.
        texts (`Mapping[int, list[int]]`, *optional*): Row to its whole sequence as finally written, from the position
            that `length` counts from, so that `texts[row][trace.length:]` stands after the root. For rows whose later
            rounds were not recorded; one call a row.

    Returns:
        [`Misalignment`]: NaN shares and lengths for no rounds.

    Raises:
        TypeError: If nothing was recorded.
        ValueError: If a text of `texts` does not hold what a round of its row emitted.
    """
    if rounds is None:
        raise TypeError("There are no recorded rounds: call `generate` inside `with gto_hf.record_rounds():`.")
    total = len(rounds)
    if not total:
        return Misalignment(0, *[float("nan")] * 4)
    pruned = same = greedy_length = tree_length = 0
    for trace, (length, kept) in zip(rounds, greedy_lengths(rounds, texts), strict=True):
        accepted = len(accepted_columns(trace))
        pruned += not kept
        same += trace.emitted[:accepted] == trace.greedy[:accepted]
        greedy_length += length
        tree_length += accepted
    return Misalignment(total, pruned / total, same / total, greedy_length / total, tree_length / total)


def greedy_lengths(rounds: list[RoundTrace], texts: Mapping[int, list[int]] | None = None) -> list[tuple[int, bool]]:
    """Per round how many tokens the greedy path alone would have had accepted, and whether the tree kept all of it.
    Arguments as in [`misalignment`]."""
    after = _written_after(rounds)
    found = []
    for trace, following in zip(rounds, after, strict=True):
        written = following if texts is None or trace.row not in texts else _given(trace, texts[trace.row])
        found.append((_common_prefix(trace.greedy, written), trace.greedy_kept == len(trace.greedy)))
    return found


def misalignment_table(results: Mapping[str, Misalignment]) -> str:
    """Markdown table, one row per name: rounds, shares in percent, mean accepted lengths in drafted tokens."""
    lines = [
        "| draft | rounds | greedy path pruned | accepted path is greedy | accepted, greedy path | accepted, tree |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        shares = [result.pruned, result.greedy_accepted_path]
        lengths = [result.greedy_accepted, result.tree_accepted]
        cells = [name.replace("|", "\\|"), str(result.rounds)]
        if result.rounds:
            cells += [f"{100 * share:.0f} %" for share in shares] + [f"{length:.2f}" for length in lengths]
        else:
            cells += ["-"] * 4
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens that `a` and `b` start with in common."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _continues(before: RoundTrace, trace: RoundTrace) -> bool:
    """Whether `trace` is the round after `before` of the same call: it starts where that one ended."""
    if not before.emitted or trace.length != before.length + len(before.emitted):
        return False
    return int(trace.tree.tokens[0, 0]) == before.emitted[-1]


def _written_after(rounds: list[RoundTrace]) -> list[list[int]]:
    """For every round what its call wrote after the root, at most as long as its greedy path."""
    newest: dict[int, tuple[RoundTrace, list[int]]] = {}  # row -> its last round, tokens of its call
    places = []
    for trace in rounds:
        before, text = newest.get(trace.row, (None, []))
        if before is None or not _continues(before, trace):
            text = []
        places.append((text, len(text)))
        text.extend(trace.emitted)
        newest[trace.row] = (trace, text)
    return [text[at : at + len(trace.greedy)] for (text, at), trace in zip(places, rounds, strict=True)]


def _given(trace: RoundTrace, text: list[int]) -> list[int]:
    """What the given text of a row holds after the root of one of its rounds, once it was checked."""
    written = text[trace.length : trace.length + max(len(trace.greedy), len(trace.emitted))]
    if written[: len(trace.emitted)] != trace.emitted:
        raise ValueError(
            f"The text given for row {trace.row} holds {written[: len(trace.emitted)]} from position {trace.length} on, "
            f"but the round at this length emitted {trace.emitted}. Give the row's whole sequence, prompt included, of "
            "one `generate` call, or leave `texts` out."
        )
    return written
