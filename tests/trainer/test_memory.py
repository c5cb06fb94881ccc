# SPDX-License-Identifier: Apache-2.0
"""No step makes the target's logits for a whole batch, neither on the text nor in the trees."""

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode

from gto_hf import GTOConfig, GTOTrainer
from gto_hf.gto import reading, scoring
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


VOCAB = 331  # no other size in these models


class Largest(TorchDispatchMode):
    """Most rows that a float tensor over the target's vocabulary had, by dtype; weights are left out."""

    def __init__(self, weights):
        self.weights, self.rows = {w.untyped_storage().data_ptr() for w in weights}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.ndim < 2:
                continue
            if tensor.shape[-1] == VOCAB and tensor.untyped_storage().data_ptr() not in self.weights:
                count = tensor.numel() // VOCAB
                self.rows[tensor.dtype] = max(count, self.rows.get(tensor.dtype, 0))
        return out


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_logits_of_the_whole_vocabulary_exist_for_few_positions(weight, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WIDE_ELEMENTS", 16 * VOCAB)
    monkeypatch.setattr(scoring, "_ROWS", 16)
    target = tiny_target(vocab=VOCAB).to(torch.bfloat16)
    rows = written_rows(tiny_target(), 4, 40)
    draft = tiny_draft(target, vocab=40)
    args = GTOConfig(
        str(tmp_path),
        report_to="none",
        gto_weight=weight,
        num_groups=4,
        group_size=4,
        per_device_train_batch_size=4,
        max_length=64,
    )
    trainer = GTOTrainer(draft, target, args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer())
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    trainer.compute_loss(trainer.model, dict(batch))  # the head is looked for once, on a few tokens
    mode = Largest([target.lm_head.weight, *draft.parameters()])
    with mode:
        trainer.compute_loss(trainer.model, dict(batch)).backward()
    assert len(rows) * 30 > 100  # supervised positions of the batch
    assert 0 < mode.rows[torch.float32] <= 16 and mode.rows[torch.bfloat16] <= 16


def test_parts_of_any_size_teach_the_same(monkeypatch):
    target = tiny_target(vocab=VOCAB)
    ids = torch.randint(3, VOCAB, (2, 12))
    readout = reading.read_target(target, ids, torch.ones_like(ids), [], 1, 12, use_cache=False).readout
    row, slot = torch.arange(2).repeat_interleave(11), torch.arange(1, 12).repeat(2)
    kept = torch.arange(0, VOCAB, 3)
    whole = readout.kept(row, slot, kept)
    for elements in (1, 5 * VOCAB):
        monkeypatch.setattr(reading, "WIDE_ELEMENTS", elements)
        for mine, theirs in zip(readout.kept(row, slot, kept), whole, strict=True):
            torch.testing.assert_close(mine, theirs)
    nothing = readout.kept(row[:0], slot[:0], kept)
    assert [len(part) for part in nothing] == [0, 0, 0]
