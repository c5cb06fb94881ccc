# SPDX-License-Identifier: Apache-2.0
"""`gto-hf card`: write the card of a draft from what is on disk and what `gto-hf eval` measured. Level 5."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.utils import cached_file

from gto_hf.checkpoints import AutoDraft
from gto_hf.checkpoints.adapters import is_adapter
from gto_hf.checkpoints.files import read_config
from gto_hf.target import is_hub_id

from .card import MARK, SUMMARY_FILE, draft_card
from .results import Measured, read_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf card`."""
    parser.add_argument("draft", help="folder or Hub id of a draft, or of an adapter on one")
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        default=[],
        help="JSON file (or folder) that `gto-hf eval --output` wrote; repeatable. Without it the card claims no figure",
    )
    parser.add_argument("--system", default=None, help="name of the draft in the results, if they have several")
    parser.add_argument(
        "--name", default=None, help="Hub id to show; default: that of the draft, or its folder's name"
    )
    parser.add_argument(
        "--target", default=None, help="Hub id of the target, where the draft's config only describes it"
    )
    parser.add_argument("--license", default=None, help="Hub identifier of the draft's licence, such as apache-2.0")
    parser.add_argument("--dataset", default=None, help="Hub id of the training data")
    parser.add_argument(
        "--training", type=Path, default=None, help=f"JSON file to read in place of the draft's `{SUMMARY_FILE}`"
    )
    parser.add_argument("--base", default=None, help="base draft of an adapter that names none")
    parser.add_argument("--output", type=Path, default=None, help="file; default: README.md in the draft's folder")
    parser.add_argument("--overwrite", action="store_true", help="also replace a card that gto-hf did not write")
    parser.add_argument("--push", action="store_true", help="also push the card to the Hub repository `--name`")


def run(args: argparse.Namespace) -> ModelCard:
    """
    Write the card and return it.

    Raises:
        ValueError: If there is nowhere to write to, a card of somebody's own is in the way, or the results are not this
            draft's.
    """
    local = os.path.isdir(args.draft)
    name = args.name or (Path(args.draft).resolve().name if local else args.draft)
    output = args.output or (Path(args.draft) / "README.md" if local else None)
    if output is None and not args.push:
        raise ValueError(f"`{args.draft}` is on the Hub: say where to write the card with `--output`, or `--push` it.")
    if args.push and "/" not in name:
        raise ValueError(f"`--push` needs the Hub id `owner/name` of the repository in `--name`; found `{name}`.")
    if args.target is not None and (not is_hub_id(args.target) or os.path.isdir(args.target)):
        raise ValueError(
            f"`--target {args.target}` is no Hub id (`owner/name`): a card names the target for other people, so it shows no "
            "folder."
        )
    if output is not None:
        _check_output(output, args.overwrite)
    config = AutoDraft.from_pretrained(args.draft, **({} if args.base is None else {"base": args.base})).config
    adapter = is_adapter(read_config(args.draft))
    if adapter:
        config._name_or_path = _adapters_base(args)
    named = (config.target or {}).get("name_or_path")
    target = named if is_hub_id(named) else args.target
    results: list[Measured] = []
    for path in args.results:
        results += read_results(path, system=args.system, target=target, tree=config.tree)
    card = draft_card(
        config,
        name=name,
        dataset_name=args.dataset,
        adapter=adapter,
        license=args.license,
        training=_training(args),
        results=results,
        base_model=args.target,
    )
    if output is not None:
        card.save(output)
    if args.push:
        card.push_to_hub(name)
    print(f"Card of {name}: {output or 'pushed'}, {len(results)} measured rows")
    return card


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuse before any work what could not be written, or would be lost."""
    if not output.resolve().parent.is_dir():
        raise ValueError(f"Cannot write `{output}`: there is no folder `{output.resolve().parent}`.")
    if output.exists() and not overwrite and MARK not in output.read_text(encoding="utf-8"):
        raise ValueError(
            f"`{output}` was not written by gto-hf. Write elsewhere with `--output`, or replace it with `--overwrite`."
        )


def _adapters_base(args: argparse.Namespace) -> str:
    """What the adapter's base draft is called."""
    return args.base or read_config(args.draft).get("base_model_name_or_path") or ""


def _training(args: argparse.Namespace) -> dict[str, Any] | None:
    """The training summary that was named, or the draft's own; None if it has none."""
    path = args.training
    if path is None:
        path = cached_file(args.draft, SUMMARY_FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The training summary `{path}` cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"The training summary `{path}` must be a JSON object, found {type(found).__name__}.")
    return found
