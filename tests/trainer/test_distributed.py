# SPDX-License-Identifier: Apache-2.0
"""Two ranks on gloo train as one process does, GTO term included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


SCRIPT = Path(__file__).with_name("distributed_script.py")
ROOT = SCRIPT.parents[2]


def launch(folder, ranks, **options):
    folder.mkdir(exist_ok=True)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*start, str(SCRIPT), json.dumps({"folder": str(folder), **options})]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(ranks)]


def same_run(one, two):
    """The same parameters and the same log up to rounding."""
    for key, value in one["state"].items():
        torch.testing.assert_close(two["state"][key], value, atol=1e-5, rtol=1e-4, msg=key)
    steps = [[entry for entry in run["logs"] if "token_loss" in entry] for run in (one, two)]
    for a, b in zip(*steps, strict=True):
        assert set(a) == set(b)
        for name in set(a) - {"epoch"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_two_ranks_train_as_one_process_with_the_whole_batch(tmp_path, weight):
    first, second = launch(tmp_path / "two", 2, gto_weight=weight)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    # One rank never has a group, and its third batch has nothing to train at all.
    if weight:
        assert first["logs"][0]["skipped_sequences"] == 1 and "gto/ratio" in first["logs"][0]
        assert abs(first["logs"][2]["gto/loss"]) > 0
    (one,) = launch(tmp_path / "one", 1, gto_weight=weight)
    same_run(one, first)
    # Three rows in batches of two: the row that fills up the last batch of the second rank counts for nothing. Of the one
    # row the second rank has neither a real row nor a prompt.
    for name in ("three", "one", "stream"):
        for figure in ("loss", "token_loss", "trained_tokens", "tau", "tau_chain", "decoding_rounds"):
            key = f"eval_{name}_{figure}"
            assert first["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-4), key
    assert (tmp_path / "two" / "report" / "metrics.csv").exists()
