# SPDX-License-Identifier: Apache-2.0
"""What makes two reference drafts the same, and that trees kept for one are not given to another."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gto_hf import AutoDraft
from gto_hf.trainer.reference import reference_fingerprint
from gto_hf.trainer.resume import check_reference
from tests.drafts.test_contract import MAKE
from tests.tiny import written_rows
from tests.trainer.helpers import make


@pytest.mark.parametrize("kind", MAKE)
def test_a_saved_draft_is_the_same_reference(llama, kind, tmp_path):
    draft = MAKE[kind](llama)
    before = reference_fingerprint(draft)
    # What training and saving write into the config is not what the draft computes.
    draft.config.trained_length, draft.config.pad_token_id = 77, 5
    draft.config.target = {**(draft.config.target or {}), "name_or_path": "org/other"}
    draft.save_pretrained(tmp_path)
    assert reference_fingerprint(AutoDraft.from_pretrained(tmp_path)) == before
    next(draft.parameters()).data.mul_(1.5)
    assert reference_fingerprint(draft) != before


@pytest.mark.parametrize(
    "field, value",
    [
        ("feature_layers", [1, 2, 3]),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("rms_norm_eps", 1e-3),
        ("norm_before_residual", True),
        ("norm_output", True),
        ("sliding_window", 8),
        ("num_attention_heads", 2),
        ("hidden_act", "gelu"),
    ],
)
def test_equal_weights_that_are_read_otherwise_are_another_reference(draft, field, value):
    other = copy.deepcopy(draft)
    assert reference_fingerprint(other) == reference_fingerprint(draft)
    assert getattr(other.config, field) != value
    setattr(other.config, field, value)
    found = reference_fingerprint(other)
    assert found != reference_fingerprint(draft)
    with pytest.raises(ValueError, match="started from"):
        check_reference("checkpoint-3", {"reference": reference_fingerprint(draft)}, found)


def test_an_adapter_with_another_scale_is_another_reference(draft):
    found = set()
    for alpha in (4, 8, 8):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=alpha, target_modules=["fc"], init_lora_weights=False)
        found.add(reference_fingerprint(get_peft_model(copy.deepcopy(draft), config)))
    assert len(found) == 2 and reference_fingerprint(draft) not in found


def test_trees_kept_for_another_reference_are_refused(llama, draft, tmp_path):
    other = copy.deepcopy(draft)
    other.config.feature_layers = [1, 2, 3]  # the same tensors
    rows, kept = written_rows(llama, 8, 24), str(tmp_path / "trees")
    options = {"group_positions": "grid", "reference_path": kept, "max_steps": 1}
    make(draft, llama, rows, tmp_path / "a", **options).train()
    with pytest.raises(ValueError, match="trees.*reference draft"):
        make(other, llama, rows, tmp_path / "b", **options)
