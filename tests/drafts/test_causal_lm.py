# SPDX-License-Identifier: Apache-2.0
"""An ordinary language model as a draft: the same numbers as its own forward, saved, trained, refused."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from gto_hf import AutoDraft, CausalLMDraft, GTOConfig, GTOTrainer, TreeConfig
from gto_hf.drafts import DraftPrefix, NodeSteps
from tests.families import FAMILIES, prompt
from tests.tiny import memorised_rows, tiny_target, tiny_tokenizer, train_tiny


TREE = TreeConfig(4, 3, 12)


def small_llama(target, **changes):
    torch.manual_seed(3)
    config = {**target.config.to_dict(), "num_hidden_layers": 2, **changes}
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3_text", "granite", "cohere2", "gpt2", "gemma3n_text"]
)
def test_logits_at_roots_and_nodes_equal_the_models_own(name):
    model = FAMILIES[name].build()
    draft = CausalLMDraft(model, tree=TREE)
    ids = prompt(2, 14)
    prefix = DraftPrefix(draft)
    positions = torch.arange(-1, 13).expand(2, -1)
    with torch.no_grad():
        outputs = prefix.extend(None, ids, positions)
        own = model(ids).logits
        torch.testing.assert_close(draft.head(outputs).log_softmax(-1), own.log_softmax(-1), atol=1e-3, rtol=1e-3)
        # two trees per text: different paths below slots 13 and 9
        steps = NodeSteps(
            prefix,
            torch.tensor([12, 8, 12, 8]),
            torch.stack([torch.ones(14), (torch.arange(14) <= 9).float()] * 2).bool(),
        )
        paths = torch.randint(3, 60, (4, 3))
        roots = outputs[[0, 0, 1, 1], [13, 9, 13, 9]]
        made = steps.unroll(roots, paths)[-1]
        for tree, (row, slot) in enumerate([(0, 13), (0, 9), (1, 13), (1, 9)]):
            text = torch.cat([ids[row, : slot + 1], paths[tree]])[None]
            expected = model(text).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(draft.head(made[tree]).log_softmax(-1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_it_drafts_the_same_and_gives_the_plain_model_back(llama, tmp_path, tied):
    draft = CausalLMDraft(small_llama(llama, tie_word_embeddings=tied), tree=TREE)
    draft.save_pretrained(tmp_path / "draft")
    loaded = AutoDraft.from_pretrained(tmp_path / "draft", target=llama)
    assert type(loaded) is CausalLMDraft and loaded.tree == TREE
    kwargs = {"do_sample": False, "max_new_tokens": 15, "return_dict_in_generate": True, "eos_token_id": None}
    ids = prompt(1, 8)
    first, second = (
        llama.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=d, **kwargs) for d in (draft, loaded)
    )
    assert first.statistics == second.statistics and torch.equal(first.sequences, second.sequences)
    loaded.model.save_pretrained(tmp_path / "plain")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(plain(ids).logits, draft.model(ids).logits)


def test_padding_rows_of_the_vocabulary_are_never_drafted(llama):
    wide = small_llama(llama, vocab_size=72)
    wide.lm_head.weight.data[64:] += 100  # would always win
    with pytest.raises(ValueError, match="72 rows, the target 64.*target=target"):
        CausalLMDraft(wide).attach(llama)
    draft = CausalLMDraft(wide, target=llama, tree=TREE)
    ids = prompt(1, 8)
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 15, "eos_token_id": None}
    assert torch.equal(llama.generate(ids, assistant_model=draft, **kwargs), llama.generate(ids, **kwargs))
    narrow = CausalLMDraft(small_llama(llama, vocab_size=60), target=llama, tree=TREE)
    assert torch.equal(llama.generate(ids, assistant_model=narrow, **kwargs), llama.generate(ids, **kwargs))


def test_what_cannot_draft_trees_is_refused_with_what_to_do(llama):
    with pytest.raises(ValueError, match="chain"):
        CausalLMDraft(FAMILIES["bloom"].build())
    with pytest.raises(ValueError, match="recurrent"):
        CausalLMDraft(FAMILIES["mamba"].build())
    with pytest.raises(ValueError, match="causal language model"):
        CausalLMDraft(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="too far apart"):
        CausalLMDraft(small_llama(llama, vocab_size=5000), target=llama)


def test_it_learns_by_token_loss_and_by_groups(tmp_path):
    target = tiny_target("llama")
    rows, prompts = memorised_rows(target)
    draft = CausalLMDraft(small_llama(target), target=target, tree=TREE)
    kwargs = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    ids = prompts[:1]
    mask = torch.ones_like(ids)
    before = target.generate(ids, attention_mask=mask, assistant_model=draft, **kwargs).statistics.tau
    train_tiny(draft, target, rows, steps=120)
    after = target.generate(ids, attention_mask=mask, assistant_model=draft, **kwargs)
    assert after.statistics.tau > before + 1
    assert torch.equal(after.sequences, target.generate(ids, attention_mask=mask, **kwargs).sequences)
    state = copy.deepcopy(draft.state_dict())
    args = GTOConfig(
        str(tmp_path),
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gto_weight=0.5,
        num_groups=1,
        group_size=4,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_steps=2,
    )
    trainer = GTOTrainer(draft, target, args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer())
    assert trainer.ttt_steps == 1
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "gto/loss" in entry]
    assert logs[0]["gto/ratio"] == pytest.approx(1) and logs[0]["gto/loss"] == pytest.approx(0, abs=1e-6)
    assert any(not torch.equal(state[k], v) for k, v in draft.state_dict().items())
    assert type(AutoDraft.from_pretrained(tmp_path / "checkpoint-2", target=target)) is CausalLMDraft
