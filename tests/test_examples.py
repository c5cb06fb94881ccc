# SPDX-License-Identifier: Apache-2.0
"""The README's Python blocks are valid. (`.ci/run` runs the quickstart itself.)"""

import ast
import re
from pathlib import Path


ROOT = Path(__file__).parent.parent


def test_readme_python_blocks_compile_and_use_public_names():
    import gto_hf

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "gto_hf":
                assert {alias.name for alias in node.names} <= set(gto_hf.__all__)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gto_hf":
                assert node.attr in gto_hf.__all__
