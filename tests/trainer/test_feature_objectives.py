# SPDX-License-Identifier: Apache-2.0
"""Training drafts that predict features: what is learnt, what is refused, what the options reach."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from gto_hf import CausalLMDraft, GTOConfig
from gto_hf.drafts import DRAFTS
from gto_hf.gto import FEATURE_OBJECTIVES
from gto_hf.trainer.script import DraftArguments, _fresh_draft
from gto_hf.trainer.tokens import TokenTerm
from tests.tiny import TREE, memorised_rows, tiny_draft, tiny_target, tiny_tokenizer, train_tiny, written_rows
from tests.trainer.helpers import logs_with, make, state


def fresh(kind, target, **kwargs):
    torch.manual_seed(1)
    return DRAFTS[kind].from_target(target, tree=TREE, **kwargs)


def tau_of(draft, target, prompts):
    output = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), assistant_model=draft, max_new_tokens=40, do_sample=False,
        eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    return output.statistics.tau


@pytest.mark.parametrize(
    "kind, objective", [("eagle", "eagle"), ("eagle", "hass"), ("griffin", "griffin"), ("griffin", "kl")]
)
def test_a_draft_that_has_learnt_some_texts_drafts_them(kind, objective):
    target = tiny_target()
    texts, prompts = memorised_rows(target, count=4, length=46)
    # Without a start from the target's layer: what it says then is learnt.
    draft = fresh(kind, target, init="random")
    before = tau_of(draft, target, prompts)
    train_tiny(draft, target, texts, steps=90, token_objective=objective)
    after = tau_of(draft, target, prompts)
    assert before < 1.5 < after, (before, after)


@pytest.mark.parametrize("objective", sorted(FEATURE_OBJECTIVES))
def test_a_draft_without_features_is_refused_at_construction(llama, rows, tmp_path, objective):
    small = LlamaForCausalLM(LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": 2}))
    for draft in (tiny_draft(llama), CausalLMDraft(small)):
        kind = draft.config.draft_type
        with pytest.raises(ValueError, match=f"{objective}.*`{kind}` predicts none.*`eagle`, `griffin`"):
            make(draft, llama, rows, tmp_path, token_objective=objective)


def test_step_weights_are_for_losses_on_distributions(llama, rows, tmp_path):
    draft = fresh("eagle", llama)
    with pytest.raises(ValueError, match="ttt_weights='dpace'.*token_objective='hass'"):
        make(draft, llama, rows, tmp_path, token_objective="hass", gto_weight=0.0, ttt_weights="dpace")


def test_noise_is_refused_with_trees_and_off_by_default(llama, rows, tmp_path):
    draft = fresh("eagle", llama)
    with pytest.raises(ValueError, match="feature_noise=0.2.*gto_weight=0.5"):
        make(draft, llama, rows, tmp_path, token_objective="eagle", feature_noise=0.2)
    assert make(draft, llama, rows, tmp_path, token_objective="eagle").tokens.recipe.noise == 0
    assert make(draft, llama, rows, tmp_path, token_objective="eagle", gto_weight=0.0).tokens.recipe.noise == 0.2
    assert make(draft, llama, rows, tmp_path, token_objective="hass", gto_weight=0.0).tokens.recipe.noise == 0


def test_noise_is_for_training_only(llama, rows, tmp_path):
    trainers = [
        make(
            fresh("eagle", llama), llama, rows, tmp_path / str(noise), token_objective="eagle", gto_weight=0.0,
            feature_noise=noise, max_steps=1, per_device_train_batch_size=4, eval_strategy="no", eval_rows=None,
        )
        for noise in (0.0, 5.0)
    ]  # fmt: skip
    held = [trainer.evaluate(trainer.train_dataset)["eval_token_loss"] for trainer in trainers]
    assert held[0] == held[1]
    for trainer in trainers:
        trainer.train()
    clean, noisy = (logs_with(trainer, "token_loss")[0] for trainer in trainers)
    assert noisy > clean


def test_options_reach_the_recipe(llama, tmp_path):
    draft = fresh("griffin", llama)

    def recipe(**kwargs):
        return TokenTerm(GTOConfig(str(tmp_path), gto_weight=0.0, **kwargs), draft, TREE)

    term = recipe(token_objective="griffin")
    assert (term.steps, term.decay, term.recipe) == (2, 1.0, FEATURE_OBJECTIVES["griffin"])
    assert recipe(token_objective="hass").steps == 3 and recipe(token_objective="eagle").steps == 1
    assert recipe(token_objective="kl").steps == TREE.depth and recipe(token_objective="kl").decay == 0.8
    changed = recipe(
        token_objective="griffin", feature_weight=2.0, distribution_weight=0.3, topk_weight=0.0, topk_tokens=5,
        align_top=0, ttt_steps=4, ttt_decay=0.9, feature_noise=0.1,
    )  # fmt: skip
    found = changed.recipe
    assert (changed.steps, changed.decay) == (4, 0.9)
    assert (found.feature_weight, found.token_weight, found.topk_weight) == (2.0, 0.3, 0.0)
    assert (found.topk_tokens, found.align_top, found.noise) == (5, 0, 0.1)
    for name, value in (("feature_weight", -1.0), ("topk_tokens", 0), ("align_top", -1), ("feature_noise", -0.1)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            GTOConfig(str(tmp_path), **{name: value})


def test_stored_features_train_the_same(llama, rows, tmp_path):
    trained = []
    for folder in (None, str(tmp_path / "features")):
        draft = fresh("eagle", llama)
        make(
            draft, llama, rows, tmp_path / "run", token_objective="hass", gto_weight=0.0, features_path=folder,
            num_train_epochs=2, per_device_train_batch_size=4,
        ).train()  # fmt: skip
        trained.append(state(draft))
    for name, value in trained[0].items():
        torch.testing.assert_close(value.float(), trained[1][name].float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "griffin"])
def test_the_command_makes_a_fresh_draft_of_the_type_that_is_asked_for(llama, kind):
    texts = Dataset.from_list(written_rows(llama, 4, 12))
    args = SimpleNamespace(chat_template_path=None, dataset_text_field="text")
    draft = _fresh_draft(llama, tiny_tokenizer(), texts, DraftArguments(draft_type=kind), args)
    assert type(draft) is DRAFTS[kind] and draft.config.draft_vocab_size == 64
    draft.head(torch.zeros(1, 32 * (2 if kind == "griffin" else 1)))
