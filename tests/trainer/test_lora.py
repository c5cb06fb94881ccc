# SPDX-License-Identifier: Apache-2.0
"""Adapters on a draft: what they move, and against which reference."""

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from gto_hf import AutoDraft
from gto_hf.decoding import as_draft
from gto_hf.gto import SequencePrefix, read_target
from tests.trainer.helpers import logs_with, make, state


def test_lora_moves_the_adapter_only_and_starts_at_the_reference(llama, draft, rows, tmp_path):
    draft.save_pretrained(tmp_path / "base")
    draft = AutoDraft.from_pretrained(tmp_path / "base")
    before = state(draft)
    trainer = make(
        draft, llama, rows, tmp_path / "out", peft_config=LoraConfig(r=4, lora_dropout=0.1), max_steps=3,
        learning_rate=1e-2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model, PeftModel)
    first = trainer.state.log_history[0]
    assert first["gto/ratio"] == 1.0 and first["gto/advantage_abs"] == 0.0
    after = {k.replace(".base_layer", ""): v for k, v in draft.state_dict().items() if "lora_" not in k}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert any(v.abs().sum() > 0 for k, v in draft.state_dict().items() if "lora_B" in k)
    # Saved, reloaded on the base, merged: the same draft as the trained one. Texts would be equal for any draft.
    trainer.save_model()
    assert "library_name: peft" in _card(trainer)
    loaded = PeftModel.from_pretrained(AutoDraft.from_pretrained(tmp_path / "base"), tmp_path / "out")
    prompt = torch.randint(3, 64, (1, 6))
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "return_dict_in_generate": True}
    mine = llama.generate(prompt, assistant_model=trainer.model, **kwargs)
    theirs = llama.generate(prompt, assistant_model=loaded, **kwargs)
    assert torch.equal(mine.sequences, theirs.sequences) and mine.statistics == theirs.statistics
    scores = _scores(trainer.model, llama, rows)
    assert torch.equal(_scores(loaded, llama, rows), scores)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(_scores(merged, llama, rows), scores, atol=1e-4, rtol=1e-4)
    base = _scores(AutoDraft.from_pretrained(tmp_path / "base"), llama, rows)
    assert (base - scores).abs().max() > 0.05  # and not that of the draft it started from
    assert llama.generate(prompt, assistant_model=merged, **kwargs).statistics == mine.statistics


def _scores(model, target, rows):
    """What a draft says at every position of some rows."""
    draft = as_draft(model).eval()
    draft.attach(target)
    ids = torch.tensor([row["input_ids"] for row in rows])
    reading = read_target(target, ids, torch.ones_like(ids), draft.config.feature_layers, 1, 2, use_cache=False)
    with torch.no_grad():
        return draft.head(SequencePrefix(draft, reading.sequences).outputs)


def _card(trainer):
    trainer.create_model_card()
    with open(f"{trainer.args.output_dir}/README.md") as file:
        return file.read()


def test_an_adapter_that_is_trained_already_is_part_of_the_reference(llama, draft, rows, tmp_path):
    wrapped = get_peft_model(draft, LoraConfig(r=2, target_modules=["fc", "q_proj"], init_lora_weights=False))
    trainer = make(wrapped, llama, rows, tmp_path, max_steps=2, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.state.log_history[0]["gto/ratio"] == 1.0
    assert trainer.state.log_history[0]["gto/advantage_abs"] == 0.0


@pytest.mark.parametrize(
    "config, words",
    [
        (LoraConfig(r=2, bias="all"), "bias"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "prompt"),
    ],
)
def test_adapters_that_would_move_the_reference_are_refused(llama, draft, rows, tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        make(draft, llama, rows, tmp_path, peft_config=config)


def test_dropout_is_off_in_fresh_adapters_too(llama, draft, rows, tmp_path):
    trainer = make(draft, llama, rows, tmp_path, max_steps=1, peft_config=LoraConfig(r=4, lora_dropout=0.3))
    trainer.train()
    assert logs_with(trainer, "gto/ratio") == [1.0] and logs_with(trainer, "gto/advantage_abs") == [0.0]
    assert all(m.p == 0 for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))
