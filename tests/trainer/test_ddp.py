# SPDX-License-Identifier: Apache-2.0
"""Two ranks on gloo: same parameters on both, token loss and evaluation of one process, and no rank waits for another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


SCRIPT = Path(__file__).with_name("ddp_script.py")
ROOT = SCRIPT.parents[2]


def launch(folder, weight, ranks):
    folder.mkdir()
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([*start, SCRIPT, folder, weight], capture_output=True, text=True, timeout=300, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(ranks)]


@pytest.mark.slow
def test_two_ranks_end_with_the_same_draft_when_one_has_no_group(tmp_path):
    first, second = launch(tmp_path / "two", "0.5", 2)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    assert any("gto/ratio" in entry for entry in first["logs"])
    assert first["logs"][0]["skipped_sequences"] == 1


@pytest.mark.slow
def test_two_ranks_train_as_one_process_with_the_whole_batch(tmp_path):
    two, _ = launch(tmp_path / "two", "0", 2)
    (one,) = launch(tmp_path / "one", "0", 1)
    for key, value in one["state"].items():
        torch.testing.assert_close(two["state"][key], value, atol=1e-5, rtol=1e-4, msg=key)
    for a, b in zip(one["logs"][:3], two["logs"][:3], strict=True):
        assert a["token_loss"] == pytest.approx(b["token_loss"], rel=1e-4)
        assert a["trained_tokens"] == b["trained_tokens"]
    # Three rows in batches of two: the row that fills up the last batch of the second rank counts for nothing. Of the one
    # row the second rank has neither a real row nor a prompt.
    found, expected = ({k: v for entry in run["logs"] for k, v in entry.items()} for run in (two, one))
    for name in ("three", "one", "stream"):
        for figure in ("loss", "token_loss", "trained_tokens", "tau", "tau_chain", "decoding_rounds"):
            key = f"eval_{name}_{figure}"
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    assert (tmp_path / "two" / "report" / "metrics.csv").exists()
