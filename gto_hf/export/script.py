# SPDX-License-Identifier: Apache-2.0
"""`gto-hf export` and `gto-hf convert`: options and printing. Level 4."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from .convert import convert
from .custom_generate import CUSTOM_GENERATE, export_custom_generate
from .dialects import ENGINES
from .folder import check_free
from .pair import read_draft, target_facts
from .write import Exported, export


_DTYPES = ("float32", "float16", "bfloat16")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf export`."""
    parser.add_argument("draft", help="Hub id or folder of the draft, in any layout")
    parser.add_argument("--to", required=True, choices=[*ENGINES, CUSTOM_GENERATE], help="engine to write for")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--target", default=None, help="Hub id or folder of the target (config and tokenizer are read)"
    )
    parser.add_argument("--target-name", default=None, help="the target's Hub id, where --target is a folder")
    parser.add_argument(
        "--feature-layers", default=None, help="comma-separated hidden_states indices, for drafts that do not say"
    )
    parser.add_argument("--dtype", default=None, choices=_DTYPES, help="of the written weights; default: the stored")
    parser.add_argument("--with-embeddings", action="store_true", help="store a copy of the target's embedding")
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        default=None,
        help="length of a chain; default: the depth of the draft's tree",
    )
    parser.add_argument("--repo", default=None, help="custom-generate: the Hub id that the folder will have")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the folder")


def run_export(args: argparse.Namespace) -> Exported:
    """Write, and print how to serve what was written."""
    check_free(args.output, overwrite=args.overwrite, sources=(args.draft, args.target))
    if (args.to == CUSTOM_GENERATE) != (args.repo is not None):
        raise ValueError("`--to custom-generate` needs `--repo owner/name`, and only it takes one.")
    facts = None if args.target is None else target_facts(args.target)
    draft = read_draft(args.draft, None, facts, _numbers(args.feature_layers))
    if args.to == CUSTOM_GENERATE:
        name = args.target_name or (None if facts is None else facts["name_or_path"])  # never a folder
        made = export_custom_generate(draft, args.output, args.repo, target_name=name, overwrite=args.overwrite)
    else:
        made = export(
            draft,
            args.output,
            args.to,
            target=args.target,
            target_name=args.target_name,
            tokenizer=None if args.target is None else AutoTokenizer.from_pretrained(args.target),
            dtype=_dtype(args.dtype),
            with_embeddings=args.with_embeddings,
            speculative_tokens=args.speculative_tokens,
            overwrite=args.overwrite,
        )
    print(made)
    return made


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf convert`."""
    parser.add_argument("source", help="Hub id or folder of a draft, in any layout")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--target", default=None, help="Hub id or folder of the target (its config is read)")
    parser.add_argument(
        "--feature-layers", default=None, help="comma-separated hidden_states indices, where the source does not say"
    )
    parser.add_argument(
        "--norm-output",
        default=None,
        choices=["true", "false"],
        help="whether the fed-back feature is normed, if asked for",
    )
    parser.add_argument("--dtype", default=None, choices=_DTYPES, help="of the weights; default: the stored one")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the folder")


def run_convert(args: argparse.Namespace) -> None:
    """Read, write, and print what was decided."""
    _, decisions = convert(
        args.source,
        args.output,
        target=args.target,
        feature_layers=_numbers(args.feature_layers),
        dtype=_dtype(args.dtype),
        overwrite=args.overwrite,
        **({} if args.norm_output is None else {"norm_output": args.norm_output == "true"}),
    )
    print(f"{decisions}\nwrote {args.output}")


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--feature-layers {text}` must be numbers with commas between, such as 2,16,29.") from error


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
