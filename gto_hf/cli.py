# SPDX-License-Identifier: Apache-2.0
"""The console script `gto-hf` (also `python -m gto_hf`). Level 8; every command is a function of the package."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import console


def main(argv: list[str] | None = None) -> int:
    """
    Run one command.

    Returns:
        `int`: 0 on success, 1 after an error that the message explains, 130 when interrupted. Wrong usage exits with 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="gto-hf", description="Train draft models and measure what they save.", epilog=console.EXIT_CODES
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="{train,regenerate,eval,bench,check,draw,convert,export,card,version}",
    )
    commands.add_parser = console.described(commands.add_parser)
    commands.add_parser("train", help="train a draft with GTOTrainer (options: gto-hf train --help)", add_help=False)
    evaluate = commands.add_parser(
        "eval",
        help="acceptance length and speed-up of drafts against plain generate",
        formatter_class=console.Help,
    )
    defaults = {"formatter_class": console.Help}
    bench = commands.add_parser("bench", help="where the time of decoding or of training goes")
    benches = bench.add_subparsers(dest="what", required=True, metavar="{decode,train}")
    benches.add_parser = console.described(benches.add_parser)
    decode = benches.add_parser(
        "decode", help="speed of trees, chains and plain generate, and what limits it", **defaults
    )
    benches.add_parser("train", help="cost of a training step in both phases", add_help=False)
    check = commands.add_parser("check", help="test a target and a draft on this machine", **defaults)
    regenerate = commands.add_parser("regenerate", help="let a target write the answers to train on", **defaults)
    draw = commands.add_parser("draw", help="draw a tree that a draft proposed", **defaults)
    card = commands.add_parser("card", help="write the model card of a draft, with measured results")
    convert = commands.add_parser("convert", help="turn a draft of any layout into gto-hf's own", **defaults)
    export = commands.add_parser("export", help="write a draft for SGLang, vLLM, speculators or EAGLE", **defaults)
    commands.add_parser("version", help="print versions")
    _add_global_options(parser, commands, benches)
    if argv[:1] == ["train"]:  # its options are those of TRL's parser, so argparse must not read them
        from gto_hf.trainer.script import main as train

        return console.report(lambda: train(argv[1:]))
    if argv[:2] == ["bench", "train"]:  # its parser is in the trainer's folder, which imports TRL
        from gto_hf.trainer.bench_script import main as bench_train

        return console.report(lambda: bench_train(argv[2:]))
    from gto_hf.data import regenerate_script
    from gto_hf.evaluation import script
    from gto_hf.evaluation import tools_script as tools
    from gto_hf.export import script as doors
    from gto_hf.hub import script as card_script

    script.add_arguments(evaluate)
    tools.add_bench_arguments(decode)
    tools.add_check_arguments(check)
    tools.add_draw_arguments(draw)
    regenerate_script.add_arguments(regenerate)
    card_script.add_arguments(card)
    doors.add_convert_arguments(convert)
    doors.add_export_arguments(export)
    parsers = {("eval",): evaluate, ("bench", "decode"): decode, ("check",): check, ("regenerate",): regenerate}
    parsers |= {("draw",): draw, ("card",): card, ("convert",): convert, ("export",): export}
    for each in parsers.values():
        each.add_argument("--config", default=None, help="a YAML file with options; those given here win")
    args = parser.parse_args(console.with_config(argv, parsers))
    actions = {"eval": script.run, "bench": tools.run_bench, "check": tools.run_check, "draw": tools.run_draw}
    actions |= {"regenerate": regenerate_script.run, "card": card_script.run}
    actions |= {"convert": doors.run_convert, "export": doors.run_export}
    return console.report(_versions if args.command == "version" else lambda: actions[args.command](args))


def _add_global_options(parser: argparse.ArgumentParser, commands: Any, benches: Any) -> None:
    """`--version` and `--completion`, which needs the parsers that stand in the trainer's folder as well."""
    from gto_hf import __version__

    def add_trainers() -> None:
        from gto_hf.trainer import bench_script, script

        commands.choices["train"], benches.choices["train"] = script.make_parser(), bench_script.make_parser()

    parser.add_argument("--version", action="version", version=f"gto-hf {__version__}", help="print the version")
    parser.add_argument(
        "--completion", action=console.Completion, parsers=add_trainers, help="print a script for this shell's Tab key"
    )


def _versions() -> None:
    from importlib.metadata import version

    for name in ("gto-hf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "huggingface_hub"):
        print(f"{name} {version(name)}")


if __name__ == "__main__":
    sys.exit(main())
