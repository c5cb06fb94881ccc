# SPDX-License-Identifier: Apache-2.0
"""The table of known faults (docs/faults.md) names tests that exist, and every row names one or says what is refused."""

import ast
import re
from pathlib import Path


TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"


FAULTS = {"A": 19, "B": 20, "C": 7, "D": 25, "E": 6, "F": 8}  # of each part, as they were collected


def rows():
    """(number, fault, what holds it)."""
    return re.findall(r"^\| \w\d+ \| (\d+)\. (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


def test_every_label_stands_there_once():
    found = re.findall(r"^\| (\w\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert found == [f"{part}{number + 1}" for part, count in FAULTS.items() for number in range(count)]
    assert len(found) == len(rows())


def test_all_faults_are_there_once_and_each_is_held_by_something():
    found = rows()
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    assert len({fault for _, fault, _ in found}) == len(found)
    for number, fault, held in found:
        assert "::test_" in held or "refused" in held.lower(), (number, fault)


def test_every_named_test_exists():
    missing = []
    for number, _, held in rows():
        for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", held):
            file = TESTS / path
            defined = file.exists() and {
                node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
            }
            if not defined or name not in defined:
                missing.append(f"{number}: {path}::{name}")
        assert held.count("::") == len(re.findall(r"`[\w/]+\.py::\w+`", held)), held
    assert not missing, missing
