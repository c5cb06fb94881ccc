# SPDX-License-Identifier: Apache-2.0
"""How all commands of `gto-hf` look and end: help, exit codes, shell completion. Level 1; knows no command."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from .extras import install_hint


EXIT_CODES = "Exit codes: 0 done; 1 an error that the last line explains; 2 wrong usage; 130 interrupted."
SHELLS = ("bash", "zsh", "tcsh")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option where there is one to show, and the text does not say it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.required or action.default is None or action.default is False
        return (
            text
            if silent or re.search(r"\bdefault(s to|:)", text, re.IGNORECASE)
            else super()._get_help_string(action)
        )


def described(add_parser: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """`add_parser` of subcommands whose own help opens with the line that the list of commands shows."""

    def add(name: str, *, help: str, **kwargs: Any) -> argparse.ArgumentParser:
        sentence = f"{help[:1].upper()}{help[1:]}."
        return add_parser(name, help=help, **{"description": sentence, "epilog": EXIT_CODES, **kwargs})

    return add


class Completion(argparse.Action):
    """
    `--completion bash`: print a script that completes commands and options with the Tab key, and exit.

    Args:
        parsers (`Callable`): Called first, to complete the parser with commands that are parsed elsewhere.
    """

    def __init__(self, *args: Any, parsers: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, choices=SHELLS, **kwargs)
        self._parsers = parsers

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None
    ) -> None:
        """Print and exit; an error that says what to install without shtab."""
        try:
            import shtab
        except ImportError:
            parser.error(f"--completion needs the package shtab: {install_hint('completion')}")
        self._parsers()
        sys.stdout.write(shtab.complete(parser, shell=values))
        parser.exit()


def report(action: Callable[[], object]) -> int:
    """
    Run a command; turn the errors that a user can act on into one line.

    Returns:
        `int`: The exit code, see `EXIT_CODES`.
    """
    try:
        action()
        sys.stdout.flush()
    except BrokenPipeError:  # `gto-hf .. | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the interpreter's own flush complain
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        print(f"gto-hf: error: {error}", file=sys.stderr)
        return 1
    except SafetensorError as error:  # it does not say of which file
        print(
            f"gto-hf: error: the weights of a model are incomplete or damaged ({error}). Download or copy its .safetensors files "
            "again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("gto-hf: interrupted", file=sys.stderr)
        return 130
    return 0
