# SPDX-License-Identifier: Apache-2.0
"""What every draft type owes: one suite over all of them."""

import copy
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from gto_hf import AutoDraft, CausalLMDraft, GTOConfig, GTOTrainer
from gto_hf.drafts import DRAFTS, DraftPrefix
from gto_hf.gto import SequencePrefix, read_target
from gto_hf.lora import LORA_TARGETS
from tests.data.chats import VOCAB as CHAT_VOCAB
from tests.data.chats import chat, chat_tokenizer, real_template
from tests.tiny import TREE, tiny_target, tiny_tokenizer, written_rows
from tests.trees import compare_trees


def small_model(target):
    torch.manual_seed(3)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields = {name: getattr(target.config, name) for name in names}
    return LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=2, pad_token_id=0)).eval()


def reduced(target, size):
    return {"draft_vocab_size": size, "token_counts": torch.arange(target.config.vocab_size, 0, -1)}


MAKE = {
    "eagle3": lambda t: DRAFTS["eagle3"].from_target(t, tree=TREE, **reduced(t, 48)),
    "eagle": lambda t: DRAFTS["eagle"].from_target(t, tree=TREE),
    "eagle with bias, norms and kept rows": lambda t: DRAFTS["eagle"].from_target(
        t, tree=TREE, fc_bias=True, attention_bias=True, layernorms=True, **reduced(t, 40)
    ),
    "griffin": lambda t: DRAFTS["griffin"].from_target(t, tree=TREE),
    "griffin with biases": lambda t: DRAFTS["griffin"].from_target(t, tree=TREE, attention_bias=True),
    "causal_lm": lambda t: CausalLMDraft(small_model(t), target=t, tree=TREE),
}
KINDS = pytest.mark.parametrize("kind", MAKE)
FEATURES = pytest.mark.parametrize("kind", ["eagle3", "eagle", "griffin"])


def llama3_like():
    """Llama 3's rotary scaling, and weights tied to the embedding as in its small sizes."""
    target = tiny_target()
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**{**target.config.to_dict(), "rope_parameters": rope, "tie_word_embeddings": True})
    model = LlamaForCausalLM(config).eval()
    model.get_output_embeddings().weight.data *= 20
    return model


TARGETS = {"llama": tiny_target, "llama3": llama3_like, "qwen3": lambda: tiny_target("qwen3")}
_MADE = {}


def target_of(name):
    if name not in _MADE:
        _MADE[name] = TARGETS[name]()
    return _MADE[name]


def make(kind, target, seed=1):
    torch.manual_seed(seed)
    return MAKE[kind](target).eval()


def logits_of(draft, target, ids):
    """The draft's logits of three steps at two roots."""
    layers = list(draft.config.feature_layers)
    reading = read_target(target, ids, torch.ones_like(ids), layers, 0, 1, use_cache=False)
    with torch.no_grad():
        return torch.stack(SequencePrefix(draft, reading.sequences).unrolled_logits(torch.tensor([[4, 7]]), 3))


def generate(target, prompt, draft=None, **kwargs):
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 14, "eos_token_id": None, **kwargs}
    return target.generate(prompt, assistant_model=draft, **options)


def train(draft, target, folder, *, rows=None, tokenizer=None, peft_config=None, resume=None, **kwargs):
    options = {
        "max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "num_groups": 2, "group_size": 3,
        "tree_depth": 3, "tree_top_k": 3, "tree_total_tokens": 8, "bf16": False, "report_to": "none", "report": False,
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "eval_prompts": 0,
    }  # fmt: skip
    rows = written_rows(target, 6, 20) if rows is None else rows
    trainer = GTOTrainer(
        draft, target, GTOConfig(str(folder), **{**options, **kwargs}), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or tiny_tokenizer(), peft_config=peft_config,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_every_type_is_here_and_can_have_an_adapter():
    assert {kind.split()[0] for kind in MAKE} == set(DRAFTS) == set(LORA_TARGETS)


# ---------------------------------------------------------------- files
@KINDS
def test_inputs_of_another_device_are_moved_at_the_drafts_door(kind):
    """The draft is on `meta`, which knows shapes alone; target and inputs are on the CPU."""
    target = tiny_target()
    draft = MAKE[kind](target).to("meta")
    ids, positions = torch.randint(3, 60, (2, 9)), torch.arange(8).expand(2, -1)
    reading = read_target(target, ids, torch.ones_like(ids), list(draft.config.feature_layers), 0, 9, use_cache=False)
    features, after = reading.sequences.features[:, :-1], ids[:, 1:]
    # Nothing can be copied off `meta`, so ids that `extend` has moved cannot go back to a borrowed embedding.
    borrowed = None if kind == "causal_lm" else target.get_input_embeddings()(after)
    assert borrowed is None or draft.embed(after).device.type == "meta"
    prefix = DraftPrefix(draft)
    for some in (slice(0, 5), slice(5, 8)):  # the second time behind keys and values that are there already
        valid = torch.ones(2, some.stop - some.start, dtype=torch.bool)
        known = None if borrowed is None else borrowed[:, some]
        output = prefix.extend(features[:, some], after[:, some], positions[:, some], valid, embeddings=known)
        assert output.device.type == "meta" and output.shape[:2] == valid.shape
    assert {tensor.device.type for layer in prefix.key_values for tensor in layer} == {"meta"}


@KINDS
def test_what_is_saved_is_what_is_loaded(tmp_path, kind):
    target = target_of("llama")
    draft = make(kind, target)
    draft.save_pretrained(tmp_path)
    again = AutoDraft.from_pretrained(tmp_path, target=target)
    assert type(again) is type(draft) and again.tree == TREE and not again.training
    ids = torch.randint(3, 60, (1, 14))
    assert torch.equal(logits_of(draft, target, ids), logits_of(again, target, ids))
    if kind != "causal_lm":
        borrowed = [name for name in again.state_dict() if "embed_tokens" in name]
        assert not borrowed and copy.deepcopy(again).attach(target) is not again


# ---------------------------------------------------------------- decoding
@KINDS
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_is_plain_generates(kind, name):
    target = target_of(name)
    draft, prompt = make(kind, target), torch.randint(3, 60, (1, 6))
    assert torch.equal(generate(target, prompt, draft, do_sample=False), generate(target, prompt, do_sample=False))


@KINDS
def test_sampled_text_is_plain_generates_with_the_same_seed(kind):
    target, prompt = target_of("llama"), torch.randint(3, 60, (1, 6))
    draft, texts = make(kind, target), []
    for assistant in (draft, None):
        torch.manual_seed(7)
        texts.append(generate(target, prompt, assistant, do_sample=True, temperature=0.8))
    assert torch.equal(*texts)


@KINDS
def test_the_training_tree_is_the_decoding_tree(kind):
    target = target_of("llama")
    assert compare_trees(target, make(kind, target), torch.randint(3, 60, (1, 6)), new=16) >= 2


# ---------------------------------------------------------------- training
@KINDS
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_step_of_either_phase_moves_every_parameter_of_the_draft_alone(tmp_path, kind, weight):
    target = target_of("llama")
    draft = make(kind, target)
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    fixed = {k: v.clone() for k, v in target.state_dict().items()}
    trainer = train(draft, target, tmp_path, gto_weight=weight)
    moved = {k for k, v in draft.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {k for k, _ in draft.named_parameters()}
    assert all(torch.equal(v, fixed[k]) for k, v in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())
    if weight:
        first = trainer.state.log_history[0]
        assert first["gto/ratio"] == 1.0 and first["reward/draft"] == first["reward/reference"]


@FEATURES
def test_an_adapter_trains_alone_and_merges(tmp_path, kind):
    target = target_of("llama")
    made = make(kind, target)
    made.save_pretrained(tmp_path / "base")
    draft = AutoDraft.from_pretrained(tmp_path / "base")
    trainer = train(
        draft,
        target,
        tmp_path / "adapter",
        peft_config=LoraConfig(r=4, lora_alpha=32),
        learning_rate=1e-2,
        max_steps=2,
    )
    trainer.save_model()
    adapted = {n.split(".base_layer")[0] for n, _ in draft.named_parameters() if ".base_layer.weight" in n}
    linear = {n for n, m in made.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert adapted == linear
    for name, value in made.state_dict().items():
        kept = draft.state_dict()
        assert torch.equal(kept[name] if name in kept else kept[_inside(name)], value), name
    ids = torch.randint(3, 60, (1, 14))
    with_adapter = logits_of(draft.eval(), target, ids)
    merged = AutoDraft.from_pretrained(tmp_path / "adapter", target=target)
    assert type(merged) is type(made) and merged.state_dict().keys() == made.state_dict().keys()
    torch.testing.assert_close(logits_of(merged, target, ids), with_adapter, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(with_adapter, logits_of(made, target, ids), atol=1e-4)


def _inside(name):
    head, tail = name.rsplit(".", 1)
    return f"{head}.base_layer.{tail}"


@pytest.mark.parametrize("kind", ["griffin"])
def test_a_run_goes_on_where_it_stopped(tmp_path, kind):
    target, ends = target_of("llama"), []
    start = make(kind, target)
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "token_objective": "hass"}
    for name in ("whole", "again"):
        draft = copy.deepcopy(start)
        train(draft, target, tmp_path / name, resume=name == "again", **options)
        ends.append(draft.state_dict())
        if name == "whole":
            shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
TEMPLATES = {"llama2": LLAMA2, "vicuna": VICUNA}
PAIRS = [(template, kind) for template in ("vicuna", "deepseek_r1_distill") for kind in ("eagle3", "eagle", "griffin")]
PAIRS += [("llama2", "eagle"), ("llama3", "griffin"), ("qwen3", "eagle")]


def chats_of(template, tokenizer):
    """Two rows. What a thinking model writes is kept as ids: its template leaves thoughts out of what is rendered again."""
    if template != "deepseek_r1_distill":
        return [{"messages": chat("What colour?", "Red.")}] * 2
    prompt = tokenizer.apply_chat_template(
        chat("What colour?"), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = tokenizer.encode("<think>It is red.</think>Red.</s>", add_special_tokens=False)
    return [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}] * 2


@pytest.mark.parametrize("template, kind", PAIRS)
def test_chats_of_the_papers_targets_train_in_both_phases(tmp_path, kind, template):
    if "chat" not in _MADE:
        _MADE["chat"] = tiny_target(vocab=CHAT_VOCAB)
    target, tokenizer = _MADE["chat"], chat_tokenizer(TEMPLATES.get(template) or real_template(template))
    rows = chats_of(template, tokenizer)
    trainer = train(
        make(kind, target),
        target,
        tmp_path,
        rows=rows,
        tokenizer=tokenizer,
        max_length=200,
        num_groups=1,
        group_size=2,
    )
    log = trainer.state.log_history[0]
    assert log["trained_tokens"] >= 2 * 3 and log["gto/ratio"] == 1.0 and log["token_loss"] > 0
    assert log["gto/tree_nodes"] > 0 and log["skipped_sequences"] == 0


# ---------------------------------------------------------------- refusals
@FEATURES
def test_another_target_is_refused_with_both_numbers(kind):
    draft = make(kind, target_of("llama"))
    with pytest.raises(ValueError, match="64.*vocab_size=80"):
        draft.attach(tiny_target(vocab=80))
    config = LlamaConfig(**{**target_of("llama").config.to_dict(), "hidden_size": 48})
    with pytest.raises(ValueError, match="width 32.*hidden_size=48"):
        draft.attach(LlamaForCausalLM(config))
    config = LlamaConfig(**{**target_of("llama").config.to_dict(), "num_hidden_layers": 7})
    with pytest.raises(ValueError, match="8.*7 layers"):
        draft.attach(LlamaForCausalLM(config))


@KINDS
def test_another_class_says_which_door_to_take(kind):
    draft = make(kind, target_of("llama"))
    for cls in set(DRAFTS.values()) - {type(draft), CausalLMDraft}:
        with pytest.raises(ValueError, match=f"`{draft.config.draft_type}`.*AutoDraft"):
            cls(copy.deepcopy(draft.config))
