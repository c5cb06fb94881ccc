# SPDX-License-Identifier: Apache-2.0
"""
`gto-hf bench train`: options, models and rows. Level 6.

    gto-hf bench train --target path/to/llm --draft path/to/draft --lengths 256,512,2048 --output bench.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gto_hf.checkpoints import AutoDraft
from gto_hf.console import EXIT_CODES, Help
from gto_hf.data import load_jsonl
from gto_hf.drafts import DraftModel, Eagle3Draft, count_tokens
from gto_hf.evaluation.facts import machine
from gto_hf.evaluation.script import positive, writable
from gto_hf.target import check_tree_support, find_device, position_limit, text_config
from gto_hf.tree import TreeConfig

from .bench import bench_train, make_steppers, sample_rows
from .bench_report import as_json, in_words, naive_table, steps_table
from .load import eos_ids, load_tokenizer


_PACKAGES = ("gto-hf", "torch", "transformers", "trl", "accelerate")


def make_parser() -> argparse.ArgumentParser:
    """The options of `gto-hf bench train`."""
    parser = argparse.ArgumentParser(
        prog="gto-hf bench train",
        description="What a training step costs: Phase I, Phase II and its variants, and the naive loop over trees.",
        epilog=EXIT_CODES,
        formatter_class=Help,
    )
    parser.add_argument("--target", required=True, help="Hub id or folder of the target")
    parser.add_argument("--draft", default=None, help="Hub id or folder of the draft; default: a fresh EAGLE-3 draft")
    parser.add_argument(
        "--reference",
        default=None,
        help="Hub id or folder of M0. Default: the draft itself, as when Phase II starts: then most nodes of the two trees are "
        "the same and cost once",
    )
    parser.add_argument("--draft-vocab-size", type=positive, default=8192, help="tokens that a fresh draft can say")
    parser.add_argument(
        "--dataset", type=Path, default=None, help="JSON Lines with `input_ids`; default: sampled texts"
    )
    parser.add_argument("--lengths", default="256,512,2048", help="tokens per row, comma-separated")
    parser.add_argument("--rows-per-step", type=positive, default=1, help="rows of a step")
    parser.add_argument("--steps", type=positive, default=3, help="timed steps of every mode and length")
    parser.add_argument("--warmup", type=positive, default=1, help="steps before them")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of target and autocast")
    parser.add_argument("--ttt-steps", type=positive, default=None, help="unrolled steps; default: depth of the tree")
    parser.add_argument("--num-groups", type=positive, default=16, help="groups per row (K)")
    parser.add_argument("--group-size", type=positive, default=8, help="adjacent positions per group (m)")
    for name in ("depth", "top-k", "total-tokens"):
        parser.add_argument(f"--tree-{name}", type=positive, default=None, help="of the trees; default: the draft's")
    parser.add_argument("--reference-roots", type=positive, default=8, help="roots of the naive loop per round")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--seed", type=int, default=0, help="of sampled texts and a fresh draft")
    parser.add_argument("--output", type=Path, default=None, help="write everything measured to this JSON file")
    return parser


def main(argv: list[str] | None = None) -> str:
    """
    Measure, print tables and what dominates; returns the tables.

    Raises:
        ValueError: For options that do not fit each other or the models, before anything is written or measured.
    """
    args = make_parser().parse_args(argv)
    lengths = parse_lengths(args.lengths, args.group_size)
    tree_options = {f"tree_{name}": getattr(args, f"tree_{name}") for name in ("depth", "top_k", "total_tokens")}
    given = {name.removeprefix("tree_"): value for name, value in tree_options.items() if value is not None}
    if args.draft is None:  # a draft's own numbers are known once it is loaded
        TreeConfig(**given)
    writable(args.output)
    count = args.steps * args.rows_per_step
    rows = None if args.dataset is None else rows_of_file(args.dataset, count, lengths[-1])

    device, dtype = find_device(None), getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    draft, reference = (None if name is None else _load(name, target) for name in (args.draft, args.reference))
    tree = TreeConfig(**{**({} if draft is None else draft.tree.to_dict()), **given})
    tokenizer = load_tokenizer(None, target)
    check_fit(target, draft, reference, tree, lengths, args.draft_vocab_size)
    vocab = text_config(target).vocab_size
    largest = max(map(max, rows or [[0]]))
    if largest >= vocab:
        raise ValueError(
            f"`--dataset {args.dataset}` holds the token id {largest}, but the target has {vocab} tokens."
        )

    if rows is None:
        rows = sample_rows(target, count, lengths[-1], eos_ids(target, tokenizer, device), args.seed)
    if draft is None:
        draft = _fresh(target, tokenizer, rows, tree, args)
    options = {
        "per_device_train_batch_size": args.rows_per_step,
        "bf16": args.dtype == "bfloat16",
        "ttt_steps": args.ttt_steps,
        "num_groups": args.num_groups,
        "group_size": args.group_size,
        "seed": args.seed,
        **tree_options,
    }
    results, naive = [], []
    with tempfile.TemporaryDirectory() as folder:
        steppers = make_steppers(draft, reference, target, tokenizer, rows, folder, options)
        for length in lengths:
            modes, slow = bench_train(
                steppers,
                rows,
                length,
                rows_per_step=args.rows_per_step,
                steps=args.steps,
                warmup=args.warmup,
                reference_roots=args.reference_roots,
                memory=not args.no_memory,
            )
            results += modes
            naive.append(slow)
    facts = {
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "tree (root excluded)": tree.to_dict(),
        "unrolled steps": args.ttt_steps or tree.depth,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in _PACKAGES},
    }
    table = steps_table(results) + "\n\n" + naive_table(results, naive)
    print("\n" + table + "\n\n" + in_words(results, naive))
    if reference is None:
        print("M0 was the draft itself: their trees are nearly the same and share most nodes. See `--reference`.")
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(as_json(results, naive, facts), indent=1), encoding="utf-8")
    return table


def parse_lengths(text: str, group_size: int) -> list[int]:
    """
    `"512,256"` to `[256, 512]`.

    Raises:
        ValueError: For what is no list of different numbers, and for rows that no group fits into.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise ValueError(f"`--lengths {text}`: write different numbers of tokens, for example 256,512.")
    lengths = sorted(int(part) for part in parts)
    # Roots are the slots from 1 to the one before the last.
    if lengths[0] < group_size + 2:
        raise ValueError(
            f"`--lengths {text}`: a group of {group_size} positions needs rows of {group_size + 2} tokens or more. Raise "
            "`--lengths` or lower `--group-size`."
        )
    return lengths


def rows_of_file(path: Path, count: int, length: int) -> list[list[int]]:
    """
    `count` rows of exactly `length` tokens, cut from the rows of a JSON Lines file put one behind the other.

    Raises:
        ValueError: If there is no such file, a row has no list of ids, or there are too few tokens.
    """
    if not path.is_file():
        raise ValueError(f"`--dataset {path}`: there is no such file.")
    ids: list[int] = []
    for number, row in enumerate(load_jsonl(path)):
        found = row.get("input_ids")
        if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
            raise ValueError(f"Row {number} of `--dataset {path}` needs `input_ids`, a list of token ids.")
        ids += found
        if len(ids) >= count * length:
            return [ids[i * length : (i + 1) * length] for i in range(count)]
    raise ValueError(
        f"`--dataset {path}` holds {len(ids)} tokens, but {count} rows of {length} are needed (steps x rows per step x longest "
        "row). Add rows, or lower `--lengths`, `--steps` or `--rows-per-step`."
    )


def check_fit(
    target: nn.Module,
    draft: DraftModel | None,
    reference: DraftModel | None,
    tree: TreeConfig,
    lengths: list[int],
    draft_vocab_size: int,
) -> None:
    """
    Refuse models that cannot be measured together.

    Raises:
        ValueError: If the target checks no trees, rows with trees would leave its positions, the draft says fewer tokens
            than the tree branches into, or M0 is another kind of draft.
    """
    check_tree_support(target)
    limit = position_limit(target)
    if limit is not None and lengths[-1] + tree.depth > limit:
        raise ValueError(
            f"`--lengths`: the target's positions end or change at {limit}, and trees of depth {tree.depth} hang below rows of "
            f"{lengths[-1]} tokens. The longest row may have {limit - tree.depth}."
        )
    says = min(draft_vocab_size, text_config(target).vocab_size) if draft is None else draft.config.draft_vocab_size
    if tree.top_k > says:
        raise ValueError(f"`top_k={tree.top_k}` of the tree is more than the draft's vocabulary of {says}.")
    if reference is None:
        return
    if draft is None:
        raise ValueError("`--reference` needs `--draft`: a fresh draft is its own M0.")
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (draft, reference)]
    if shapes[0] != shapes[1] or not torch.equal(draft.kept_ids, reference.kept_ids):
        raise ValueError(
            "`--reference` and `--draft` differ in shape or vocabulary: M0 is a draft that training began with."
        )


def _load(name: str, target: nn.Module) -> DraftModel:
    return AutoDraft.from_pretrained(name, target=target, dtype=torch.float32)


def _fresh(
    target: nn.Module, tokenizer: Any, rows: list[list[int]], tree: TreeConfig, args: argparse.Namespace
) -> DraftModel:
    vocab = text_config(target).vocab_size
    torch.manual_seed(args.seed)
    size = min(args.draft_vocab_size, vocab)
    counts = count_tokens(rows, vocab)
    return Eagle3Draft.from_target(target, draft_vocab_size=size, token_counts=counts, tokenizer=tokenizer, tree=tree)
