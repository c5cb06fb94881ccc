# SPDX-License-Identifier: Apache-2.0
"""
The public API is a promise: names, signatures, import effects and package data are those recorded here.

After a deliberate change (see "Compatibility" in CONTRIBUTING.md): `GTO_HF_UPDATE_API=1 pytest tests/test_public_api.py`.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import gto_hf


ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "public_api.json"


def described(thing):
    """Signature of a function; of a class, its fields or constructor, and the public methods and properties that are ours."""
    if not inspect.isclass(thing):
        return str(inspect.signature(thing))
    members = {}
    ours = [parent for parent in reversed(thing.__mro__) if parent.__module__.startswith("gto_hf")]
    for name, member in [item for parent in ours for item in vars(parent).items()]:
        if name.startswith("_"):
            continue
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member):
            members[name] = str(inspect.signature(member))
        elif isinstance(member, property):
            members[name] = "property"
    if is_dataclass(thing):
        base = {f.name for parent in thing.__mro__[1:] if is_dataclass(parent) for f in fields(parent)}
        own = [f for f in fields(thing) if f.name in thing.__annotations__ or f.name not in base]
        # As written: parsers replace the type of a field by what its name stands for.
        made = ", ".join(f"{f.name}: {thing.__annotations__.get(f.name, f.type)}" for f in own)
    else:
        made = str(inspect.signature(thing.__init__)) if "__init__" in vars(thing) else "inherited"
    return {"made from": made, **dict(sorted(members.items()))}


def test_names_and_signatures_are_those_recorded():
    found = {name: described(getattr(gto_hf, name)) for name in gto_hf.__all__}
    if os.environ.get("GTO_HF_UPDATE_API"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    recorded = json.loads(GOLDEN.read_text())
    gone = {
        f"{name}.{member}"
        for name, members in recorded.items()
        for member in (members if isinstance(members, dict) else [""])
        if name not in found or (member and member not in found[name])
    }
    assert not gone, f"no longer there: {gone}; see Compatibility in CONTRIBUTING.md"
    assert found == recorded, (
        "the API has changed: run with GTO_HF_UPDATE_API=1 if that is meant, and say it in CHANGELOG.md"
    )


def test_importing_changes_the_two_documented_methods_and_nothing_else():
    code = """
import json, logging, sys, warnings
import torch, transformers
from transformers import AutoConfig, AutoModel, GenerationMixin, PreTrainedModel
from transformers.generation import utils

owners = {"GenerationMixin": GenerationMixin, "PreTrainedModel": PreTrainedModel, "utils": utils}
def state():
    found = {f"{o}.{n}": id(v) for o, owner in owners.items() for n, v in vars(owner).items()}
    found |= {"filters": len(warnings.filters), "level": logging.getLogger().level, "handlers": len(logging.getLogger().handlers)}
    found |= {"seed": torch.initial_seed(), "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype())}
    return found
before = state()
import gto_hf
after = state()
gto_hf.uninstall()
print(json.dumps({
    "changed": sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k)),
    "left": sorted(k for k in before if before[k] != state().get(k)),
    "imported": [m for m in ("trl", "peft", "datasets", "matplotlib", "rich", "evaluate", "pandas") if m in sys.modules],
}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    hooked = ["GenerationMixin._assisted_decoding", "GenerationMixin._validate_generation_mode"]
    assert found == {"changed": hooked, "left": [], "imported": []}, found
    assert done.stderr == ""


def test_type_checkers_find_the_annotations():
    assert (Path(gto_hf.__file__).parent / "py.typed").is_file()


def test_lower_bounds_are_those_of_the_tested_versions():
    """`.ci/versions` takes the oldest versions from here, so they must be plain lower bounds."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in named)
    assert bounds.keys() >= {"torch", "transformers", "trl", "peft", "accelerate"}
    assert "<" in next(text for text in named if text.startswith("transformers"))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("broken", ["transformers", "trl"])
def test_a_version_that_cannot_be_looked_up_ends_the_matrix(broken, tmp_path):
    """Else the script would go on and test a version of its own making."""
    stub = tmp_path / "python3"
    stub.write_text(
        """#!/usr/bin/env bash
case "$*" in
    *"pip download"*BROKEN*) echo "no such index" >&2; exit 1;;
    *"pip download"*) name=transformers; case "$*" in *trl*) name=trl;; esac
        while [ "$1" != -d ]; do shift; done; mkdir -p "$2"; touch "$2/$name-9.9-py3-none-any.whl";;
    *) echo "went on: $*" >&2; exit 3;;
esac
""".replace("BROKEN", broken)
    )
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(ROOT / ".ci" / "versions")], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "no such index" in done.stderr and "went on" not in done.stderr, done


@pytest.mark.slow
def test_the_wheel_holds_everything_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith("gto_hf/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in filter(None, tracked.split("\0")) if name.startswith("gto_hf/")}
