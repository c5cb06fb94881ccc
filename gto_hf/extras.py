# SPDX-License-Identifier: Apache-2.0
"""What to type to get an optional dependency. Level 0."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution


def install_hint(extra: str) -> str:
    """
    The command that installs an extra of this package, the way the package itself was installed.

    Args:
        extra (`str`): Name of the extra in `pyproject.toml`.
    """
    try:
        origin = json.loads(distribution("gto-hf").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" in origin:  # from a clone: the package's name may not lead to it
        return f'`pip install -e ".[{extra}]"` in the clone'
    return f'`pip install "gto-hf[{extra}]"`'
