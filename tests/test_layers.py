# SPDX-License-Identifier: Apache-2.0
"""The layer rule: a folder imports only from lower levels, and third-party packages stay where they belong."""

import ast
from pathlib import Path

import gto_hf


ROOT = Path(gto_hf.__file__).parent
LEVELS = {
    "extras": 0,
    "tree": 0,
    "metrics": 0,
    "console": 1,
    "target": 1,
    "drafts": 2,
    "checkpoints": 3,
    "lora": 3,
    "gto": 4,
    "decoding": 4,
    "data": 4,
    "export": 4,
    "evaluation": 5,
    "hub": 5,
    "trainer": 6,
    "quickstart": 7,
    "cli": 8,
    "__main__": 9,
}
ONLY_IN = {
    "trl": {"trainer"},
    "peft": {"checkpoints"},  # to read adapters; else reached through its models' own methods
    "huggingface_hub": {"hub", "checkpoints"},
    "evaluate": {"metrics"},
}
MAX_LINES = 450


def imports(path):
    """(module, line) of every import of a file, relative ones made absolute."""
    package = ["gto_hf", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if node.module:
                yield module, node.lineno
            else:
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def files():
    return [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]


def area(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_folders_import_only_from_lower_levels():
    wrong = []
    for path in files():
        own = area(path)
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "gto_hf" or len(parts) < 2 or parts[1] == own or parts[1] not in LEVELS:
                continue
            if LEVELS[parts[1]] >= LEVELS[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, wrong


def test_every_folder_has_a_level():
    assert {area(p) for p in files()} <= set(LEVELS)


def test_third_party_packages_stay_where_they_belong():
    wrong = []
    for path in files():
        for module, line in imports(path):
            allowed = ONLY_IN.get(module.split(".")[0])
            if allowed is not None and area(path) not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
        if area(path) == "tree":
            heads = {m.split(".")[0] for m, _ in imports(path)}
            assert heads <= {"torch", "gto_hf", "__future__", "dataclasses", "collections", "typing", "bisect"}, heads
    assert not wrong, wrong


def test_every_module_says_what_it_is_and_stays_small():
    for path in [*files(), ROOT / "__init__.py"]:
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(ast.parse(text)), path
        assert text.count("\n") <= MAX_LINES, path


def test_public_functions_are_documented_and_annotated():
    missing = []
    for path in files():
        for node, inner in definitions(ast.parse(path.read_text())):
            if node.name.startswith("_"):
                continue
            setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
            if not ast.get_docstring(node) and not inner and not setter:
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has no docstring")
            if isinstance(node, ast.FunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
                if bare or node.returns is None:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {bare or 'return'}")
    assert not missing, missing


def definitions(tree, inner=False):
    """Every class and function with whether it stands inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, inner
            yield from definitions(node, inner or isinstance(node, ast.FunctionDef))
        else:
            yield from definitions(node, inner)


def test_every_gto_option_is_read_somewhere():
    from dataclasses import fields

    from trl import SFTConfig

    own = {f.name for f in fields(gto_hf.GTOConfig)} - {f.name for f in fields(SFTConfig)}
    text = "\n".join(p.read_text() for p in (ROOT / "trainer").glob("*.py"))
    for name in own:
        assert f"args.{name}" in text or f"self.{name}" in text, name
