# SPDX-License-Identifier: Apache-2.0
"""
Tests that talk to the test Hub. `huggingface_hub` reads endpoint, token and cache from the environment when it is
imported, and all other tests are offline, so these run in a process of their own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from .server import Hub


TOKEN = "hf_ofTheTestUserAndOfNobodyElse"
USER = "me"


@functools.cache
def hub() -> Hub:
    """The server of this process; only in the process that [`worker`] starts."""
    return Hub({TOKEN: USER, "hf_ofSomebodyElse": "you"})


def _start() -> None:
    """Serve, and point the libraries there before they are imported."""
    os.environ["HF_ENDPOINT"] = hub().__enter__().url


def _run(module: str, name: str, arguments: dict[str, object]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


@contextmanager
def worker(folder: Path) -> Iterator[ProcessPoolExecutor]:
    """A process with a Hub of its own and an empty cache below `folder`; it gets calls of `_run`."""
    changes = {
        "HF_HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "home" / "hub"),
        "HF_DATASETS_CACHE": str(folder / "home" / "datasets"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": TOKEN,
        "TQDM_DISABLE": "1",
    }
    with ProcessPoolExecutor(1, get_context("spawn"), _start) as pool:
        with patch.dict(os.environ, changes):
            pool.submit(int).result()  # starts the process, which keeps this environment
        yield pool


def online(test: Callable) -> Callable:
    """Run a test where the Hub is [`hub`]; its fixtures are made here and must be picklable."""

    @functools.wraps(test)
    def there(online_worker: ProcessPoolExecutor, **fixtures: object) -> None:
        online_worker.submit(_run, test.__module__, test.__name__, fixtures).result()

    own = inspect.signature(test)
    first = inspect.Parameter("online_worker", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    there.__signature__ = own.replace(parameters=[first, *own.parameters.values()])
    return there
