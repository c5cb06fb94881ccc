# SPDX-License-Identifier: Apache-2.0
"""Offline, and the drafts that several test modules share."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: more threads would only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"

import datasets  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

from .tiny import memorised_rows, tiny_draft, tiny_target, train_tiny  # noqa: E402


logging.disable_progress_bar()
datasets.disable_progress_bars()


@pytest.fixture(scope="session", params=["llama", "qwen3", "gpt2"])
def trained(request):
    """A tiny target, a draft that has learned some of its greedy texts, and the prompts of those texts."""
    target = tiny_target(request.param)
    rows, prompts = memorised_rows(target)
    draft = tiny_draft(target, vocab=60)
    train_tiny(draft, target, rows)
    return target, draft, prompts


@pytest.fixture
def llama():
    return tiny_target("llama")


@pytest.fixture
def draft(llama):
    return tiny_draft(llama)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
