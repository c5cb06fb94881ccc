# SPDX-License-Identifier: Apache-2.0
"""How all commands of `gto-hf` look and end: help, exit codes, shell completion. Level 1; knows no command."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import yaml
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


def with_config(argv: list[str], parsers: Mapping[tuple[str, ...], argparse.ArgumentParser]) -> list[str]:
    """
    The command line with the options of the YAML file behind `--config` before its own, so that its own win.

    Keys of the file are names of options (`max-new-tokens` or `max_new_tokens`); a list repeats an option that may be
    repeated, and is joined by commas for another; `true` sets a flag, `null` says nothing.

    Args:
        argv (`list[str]`): Of the whole program. parsers (`Mapping`): By the words of their command; `--config` is declared.
    """
    words = next((words for words in parsers if tuple(argv[: len(words)]) == words), None)
    if words is None:
        return argv
    parser, given = parsers[words], argv[len(words) :]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=None, nargs="?", const="")
    file = finder.parse_known_args(given)[0].config
    if file is None:
        return argv
    if not os.path.isfile(file):
        parser.error(f"--config: there is no file {file}" if file else "--config needs a YAML file")
    with open(file, encoding="utf-8") as stream:
        try:
            values = yaml.safe_load(stream)
        except yaml.YAMLError as error:
            parser.error(f"--config: this is not YAML: {' '.join(str(error).split())}")
    if not isinstance(values, dict):
        parser.error(f"--config: {file} must hold a mapping of options to values")
    options: list[str] = []
    for key, value in values.items():
        name = f"--{str(key).replace('_', '-')}"
        action = parser._option_string_actions.get(name)
        if action is None or name in ("--config", "--help"):
            parser.error(f"--config: {file} has `{key}`, which is no option of this command")
        said = any(each.partition("=")[0] in action.option_strings for each in given)
        if not said:  # what stands on the command line would be added to a repeated option, and may exclude others
            options += _as_options(name, value, action)
    return [*words, *options, *given]


def _as_options(name: str, value: Any, action: argparse.Action) -> list[str]:
    """One entry of a YAML file as words of a command line."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return [] if value is None else [name if value else f"--no-{name[2:]}"]
    if value is None or (action.nargs == 0 and value is False):
        return []
    if action.nargs == 0:
        return [name] if value is True else [f"{name}={value}"]  # which argparse refuses
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        return [f"{name}={part}" for part in value]
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return [f"{name}={json.dumps(text) if isinstance(text, (dict, bool)) else text}"]


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
