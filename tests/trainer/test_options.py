# SPDX-License-Identifier: Apache-2.0
"""Options of `GTOConfig` that must not be lost, and values that no run can use."""

import math

import pytest
import torch

from gto_hf import GTOConfig, GTOTrainer
from gto_hf.trainer.sums import Sums
from tests.tiny import written_rows
from tests.trainer.helpers import OFF, make


FLOATS = [
    "ttt_decay", "feature_weight", "distribution_weight", "topk_weight", "feature_noise", "gto_weight", "gto_beta", "gto_eta",
    "gto_epsilon", "gto_delta", "target_temperature", "eval_temperature",
]  # fmt: skip


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}={value}` must be a finite number"):
        GTOConfig(str(tmp_path), **OFF, **{name: value})


def test_the_list_above_has_every_number_of_ours():
    own = set(GTOConfig.__annotations__) - set(GTOConfig.__mro__[1].__dataclass_fields__)
    assert {name for name in own if "float" in str(GTOConfig.__annotations__[name])} == set(FLOATS)
    assert GTOConfig("x", **OFF, max_grad_norm=math.inf).max_grad_norm == math.inf  # logs the norm, cuts nothing


def test_rows_are_padded_to_a_multiple(llama, draft, tmp_path):
    rows = written_rows(llama, 4, 21)
    trainer = make(draft, llama, rows, tmp_path, pad_to_multiple_of=16)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    assert {tuple(value.shape) for value in batch.values()} == {(2, 32)} and int(batch["attention_mask"].sum()) == 42


def test_one_process_with_several_gpus_is_refused_before_anything_is_loaded(draft, tmp_path):
    args = GTOConfig(str(tmp_path), **OFF)
    assert args.n_gpu <= 1
    args._n_gpu = 2
    with pytest.raises(ValueError, match="2 GPUs.*accelerate launch.*CUDA_VISIBLE_DEVICES"):
        GTOTrainer(draft, "no/such/target", args)


def test_counts_of_many_tokens_are_whole():
    class One:
        device = torch.device("cpu")

        def reduce(self, tensor, reduction):
            return tensor

    sums = Sums(["token_loss"], ["trained_tokens"])
    sums.mean("token_loss", 1.0, 1)
    for count in (2**24, 1):
        sums.total("trained_tokens", count)
    assert sums.pop(One())["trained_tokens"] == 2**24 + 1
