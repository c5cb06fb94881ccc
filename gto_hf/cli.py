# SPDX-License-Identifier: Apache-2.0
"""The console script `gto-hf` (also `python -m gto_hf`). Level 8; every command is a function of the package."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """
    Run one command.

    Returns:
        `int`: 0 on success, 1 after an error that the message explains. Wrong usage exits with 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="gto-hf", description="Train draft models and measure what they save.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,eval,version}")
    commands.add_parser("train", help="train a draft with GTOTrainer (options: gto-hf train --help)", add_help=False)
    evaluate = commands.add_parser(
        "eval",
        help="acceptance length and speed-up of drafts against plain generate",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    commands.add_parser("version", help="print versions")
    if argv[:1] == ["train"]:  # its options are those of TRL's parser, so argparse must not read them
        from gto_hf.trainer.script import main as train

        return _report(lambda: train(argv[1:]))
    from gto_hf.evaluation.script import add_arguments, run

    add_arguments(evaluate)
    args = parser.parse_args(argv)
    return _report(_versions if args.command == "version" else lambda: run(args))


def _report(action: object) -> int:
    """Run; turn the errors a user can act on into one line."""
    try:
        action()
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        print(f"gto-hf: error: {error}", file=sys.stderr)
        return 1
    return 0


def _versions() -> None:
    from importlib.metadata import version

    for name in ("gto-hf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "huggingface_hub"):
        print(f"{name} {version(name)}")


if __name__ == "__main__":
    sys.exit(main())
