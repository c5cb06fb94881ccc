# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft: shape, save and load, vocabulary, attachment, and equality with a plain reading of its weights."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from gto_hf import AutoDraft, DraftCheckpointError, DraftConfig, DraftModel, Eagle3Draft, TreeConfig, count_tokens
from gto_hf.drafts import choose_draft_vocab
from gto_hf.gto import SequencePrefix, Sequences
from tests.reference.naive_eagle3 import NaiveEagle3
from tests.tiny import TREE, tiny_draft, tiny_target


def sequences(target, draft, ids, valid=None):
    """A batch with the target's features, as training reads it."""
    valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    layers = list(draft.config.feature_layers)
    with torch.no_grad():
        states = target(ids, attention_mask=valid.long(), position_ids=positions, output_hidden_states=layers)
    features = torch.cat([states.hidden_states[i] for i in layers], -1)
    return Sequences(ids, features, valid, positions)


# ---------------------------------------------------------------- values
def test_unrolled_logits_equal_a_plain_reading_of_the_weights(llama, draft):
    ids = torch.randint(3, 48, (2, 14))
    batch = sequences(llama, draft, ids)
    roots = torch.tensor([[3, 7, 9], [1, 5, 9]])
    with torch.no_grad():
        steps = SequencePrefix(draft, batch).unrolled_logits(roots, 4)
        naive = NaiveEagle3(draft, llama.get_input_embeddings().weight)
        for b in range(2):
            for n, t in enumerate(roots[b].tolist()):
                row = ids[b].tolist()
                expected = naive.logits(batch.features[b, :t], row[: t + 1], row[t + 1 : t + 4])
                for k in range(4):
                    torch.testing.assert_close(steps[k][b, n], expected[k], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_every_rows_own_logits(llama, draft, side):
    rows = [torch.randint(3, 48, (1, n)) for n in (14, 9, 11)]
    ids, valid = torch.zeros(3, 14, dtype=torch.long), torch.zeros(3, 14, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = row.shape[1]
        where = slice(0, n) if side == "right" else slice(14 - n, 14)
        ids[i, where], valid[i, where] = row[0], True
    offset = 0 if side == "right" else 1
    with torch.no_grad():
        together = SequencePrefix(draft, sequences(llama, draft, ids, valid))
        for i, row in enumerate(rows):
            n = row.shape[1]
            shift = offset * (14 - n)
            roots = torch.tensor([[2, 5]])
            alone = SequencePrefix(draft, sequences(llama, draft, row)).unrolled_logits(roots, 3)
            batched = together.unrolled_logits(roots.repeat(3, 1) + shift, 3)
            for a, b in zip(alone, batched, strict=True):
                torch.testing.assert_close(a[0], b[i], atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_changes_no_value_and_no_gradient(llama, draft):
    batch = sequences(llama, draft, torch.randint(3, 48, (1, 12)))
    grads = []
    for checkpointing in (False, True):
        model = copy.deepcopy(draft).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        sum(
            x.square().sum() for x in SequencePrefix(model, batch).unrolled_logits(torch.tensor([[2, 6]]), 3)
        ).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------- from_target
def test_from_target_starts_from_the_targets_head_and_norm(llama):
    llama.model.norm.weight.data.uniform_(0.5, 2)
    counts = torch.zeros(64, dtype=torch.long)
    counts[[10, 20, 30]] = torch.tensor([5, 9, 7])
    draft = Eagle3Draft.from_target(
        llama, draft_vocab_size=8, token_counts=counts, feature_layers=[1, 4, 6], tree=TREE
    )
    kept = draft.kept_ids
    assert {10, 20, 30, 1, 2} <= set(kept.tolist())  # seen tokens, BOS and EOS
    assert torch.equal(draft.lm_head.weight, llama.lm_head.weight[kept])
    torch.testing.assert_close(draft.norm.weight, llama.model.norm.weight)
    assert draft.config.feature_layers == [1, 4, 6] and draft.config.head_dim == 8
    assert draft.config.target["num_hidden_layers"] == 8


def test_from_target_reads_a_gemma_norm_by_what_it_does():
    config = GemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    )
    target = GemmaForCausalLM(config).eval()
    target.model.norm.weight.data.uniform_(-0.5, 0.5)
    draft = Eagle3Draft.from_target(target)
    torch.testing.assert_close(draft.norm.weight, 1 + target.model.norm.weight)
    assert draft.config.head_dim == 16
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(draft.embed(ids), target.model.embed_tokens.weight[ids])  # raw rows, not scaled ones


def test_a_tied_target_gives_an_untied_draft():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    draft = Eagle3Draft.from_target(
        LlamaForCausalLM(config), draft_vocab_size=24, token_counts=torch.arange(64), tree=TreeConfig(3, 4, 9)
    )
    assert not draft.config.tie_word_embeddings and draft.lm_head.weight.shape == (24, 32)


def test_a_narrower_draft_has_its_own_embedding(llama, tmp_path):
    draft = Eagle3Draft.from_target(llama, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    assert draft.config.own_embeddings and draft.fc.weight.shape == (16, 96)
    draft.save_pretrained(tmp_path)
    again = AutoDraft.from_pretrained(tmp_path, target=llama)
    assert torch.equal(again.embed_tokens.weight, draft.embed_tokens.weight)
    prompt = torch.randint(3, 64, (1, 5))
    kwargs = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(llama.generate(prompt, assistant_model=again, **kwargs), llama.generate(prompt, **kwargs))


def test_shallow_targets_need_named_feature_layers():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    target = LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="feature_layers"):
        Eagle3Draft.from_target(target)
    assert Eagle3Draft.from_target(target, feature_layers=[1, 2]).fc.weight.shape == (32, 64)


def test_a_reduced_vocabulary_without_counts_is_refused(llama):
    with pytest.raises(ValueError, match="token_counts"):
        Eagle3Draft.from_target(llama, draft_vocab_size=24)


def test_a_reduced_draft_without_a_map_cannot_be_attached(llama):
    config = tiny_draft(llama).config
    with pytest.raises(ValueError, match="no map"):
        Eagle3Draft(copy.deepcopy(config)).attach(llama)


def test_draft_vocabulary_is_padded_and_keeps_structural_tokens():
    counts = torch.zeros(64, dtype=torch.long)
    counts[40:50] = 3
    kept = choose_draft_vocab(counts, 24, always_keep=[2, 63])
    assert kept.tolist() == sorted(kept.tolist()) and len(set(kept.tolist())) == 24
    assert {2, 63, *range(40, 50)} <= set(kept.tolist())
    for size in (0, -1, 65):
        with pytest.raises(ValueError, match="draft_vocab_size"):
            choose_draft_vocab(counts, size)
    with pytest.raises(ValueError, match="special"):
        choose_draft_vocab(counts, 2, always_keep=[1, 2, 3])


def test_byte_level_tokens_are_kept_whatever_the_corpus(llama):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<s>": 256, "ab": 257}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    target = tiny_target("llama", vocab=300)
    counts = count_tokens([[257, 257, 290]], 300)
    draft = Eagle3Draft.from_target(target, draft_vocab_size=270, token_counts=counts, tokenizer=tokenizer)
    assert {*range(257), 257, 290} <= set(draft.kept_ids.tolist())


def test_draft_and_target_ids_are_inverse(llama):
    draft = tiny_draft(llama, vocab=24)
    ids = torch.arange(24)
    assert torch.equal(draft.to_draft_ids(draft.to_target_ids(ids)), ids)
    unsayable = torch.tensor([i for i in range(64) if i not in draft.kept_ids.tolist()])
    assert (draft.to_draft_ids(unsayable) == -1).all()


# ---------------------------------------------------------------- save and load
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("door", [AutoDraft, AutoModel, Eagle3Draft])
def test_save_and_load_give_equal_logits(llama, draft, tmp_path, dtype, door):
    draft = draft.to(dtype)
    draft.save_pretrained(tmp_path)
    again = door.from_pretrained(tmp_path)
    assert again.dtype == dtype and again.d2t.dtype == torch.long and again.t2d.dtype == torch.bool
    assert not again.training and again.tree == draft.tree
    assert torch.equal(again.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
    again.attach(llama)
    batch = sequences(llama, draft, torch.randint(3, 48, (1, 10)))
    with torch.no_grad():
        for a, b in zip(
            *(SequencePrefix(d, batch).unrolled_logits(torch.tensor([[4]]), 3) for d in (draft, again)), strict=True
        ):
            assert torch.equal(a, b)


def test_the_saved_folder_holds_no_target_weights_and_no_local_path(llama, draft, tmp_path):
    llama.config._name_or_path = str(tmp_path / "secret")
    Eagle3Draft.from_target(llama).save_pretrained(tmp_path / "draft")
    assert not any("embed" in key for key in load_file(tmp_path / "draft" / "model.safetensors"))
    assert str(tmp_path) not in (tmp_path / "draft" / "config.json").read_text()


@pytest.mark.parametrize("door", [AutoDraft, AutoModel, Eagle3Draft])
def test_missing_and_unexpected_tensors_are_named(draft, tmp_path, door):
    draft.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for change, words in (({"norm.weight": None}, "norm.weight"), ({"extra.weight": torch.ones(2)}, "extra.weight")):
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DraftCheckpointError, match=words):
            door.from_pretrained(tmp_path)


def test_a_newer_format_is_refused(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(ValueError, match="99"):
        AutoDraft.from_pretrained(tmp_path)


def test_rope_base_survives_old_and_new_style(llama, tmp_path):
    llama.config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    draft = Eagle3Draft.from_target(llama)
    assert draft.config.rope_parameters["rope_theta"] == 500000.0
    draft.save_pretrained(tmp_path)
    again = AutoDraft.from_pretrained(tmp_path)
    assert torch.equal(again.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
    assert not torch.equal(again.rotary_emb.inv_freq, tiny_draft(tiny_target()).rotary_emb.inv_freq)


def test_the_tree_is_saved_and_can_be_replaced(draft, tmp_path):
    draft.tree = TreeConfig(depth=3, top_k=2, total_tokens=5)
    draft.save_pretrained(tmp_path)
    assert AutoDraft.from_pretrained(tmp_path).tree == TreeConfig(3, 2, 5)
    assert AutoDraft.from_pretrained(tmp_path, tree=TreeConfig(2, 2, 4)).tree == TreeConfig(2, 2, 4)
    with pytest.raises(ValueError, match="vocabulary"):
        draft.tree = TreeConfig(depth=2, top_k=49, total_tokens=10)
    with pytest.raises(TypeError, match="TreeConfig"):
        draft.tree = {"depth": 2}


def test_auto_config_knows_the_draft(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DraftConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), DraftModel)


def test_deepcopy_shares_the_targets_embedding_and_nothing_else(llama, draft):
    other = copy.deepcopy(draft)
    assert other._borrowed.module is llama.get_input_embeddings()
    assert all(a is not b for a, b in zip(other.parameters(), draft.parameters(), strict=True))
    assert not any("embed" in name for name in draft.state_dict())


def test_an_unattached_draft_says_so(llama, draft, tmp_path):
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attach"):
        AutoDraft.from_pretrained(tmp_path).embed(torch.tensor([[3]]))
    # but generate attaches by itself
    prompt = torch.randint(3, 64, (1, 5))
    llama.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=AutoDraft.from_pretrained(tmp_path),
        max_new_tokens=4,
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"draft_vocab_size": 65}, "draft_vocab_size=65"),
        ({"feature_layers": [4, 2]}, "ascending"),
        ({"feature_layers": [2, 2]}, "distinct"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"target_hidden_size": 48}, "own_embeddings"),
        ({"tree": {"depth": 1, "top_k": 2, "total_tokens": 3}}, "total_tokens=3"),
        ({"tree": {"levels": 3}}, "levels"),
    ],
)
def test_contradicting_configs_are_refused(draft, change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DraftConfig(**(draft.config.to_dict() | change))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.update({"d2t": t["d2t"] + 60}), "outside"),
        (lambda t: t.update({"d2t": t["d2t"] * 0 - torch.arange(48)}), "already"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight"),
    ],
)
@pytest.mark.parametrize("door", [AutoDraft, AutoModel])
def test_corrupt_values_are_refused_at_loading(draft, tmp_path, change, words, door):
    draft.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftCheckpointError, match=words):
        door.from_pretrained(tmp_path)


def test_a_target_with_a_narrower_embedding_gives_the_draft_its_own():
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    target = OPTForCausalLM(config).eval()
    draft = Eagle3Draft.from_target(target)
    assert draft.config.own_embeddings
    prompt = torch.randint(3, 64, (1, 5))
    kwargs = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(target.generate(prompt, assistant_model=draft, **kwargs), target.generate(prompt, **kwargs))
    borrowing = Eagle3Draft.from_target(target, own_embeddings=True)
    borrowing.config.own_embeddings = False
    with pytest.raises(ValueError, match="width 16"):
        borrowing.check_target(target)


def test_a_relative_target_folder_is_not_stored_as_a_hub_id(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama.save_pretrained("outputs/llama")
    llama.config._name_or_path = "outputs/llama"
    assert Eagle3Draft.from_target(llama).config.target["name_or_path"] is None
    llama.config._name_or_path = "org/llama"
    assert Eagle3Draft.from_target(llama).config.target["name_or_path"] == "org/llama"


def test_what_a_fresh_draft_copies_is_an_option(llama):
    drafts = {init: Eagle3Draft.from_target(llama, init=init) for init in ("target", "head", "random")}
    head, layer = llama.lm_head.weight, llama.model.layers[-1].mlp.up_proj.weight
    for init, draft in drafts.items():
        assert torch.equal(draft.lm_head.weight, head) == (init != "random")
        assert torch.equal(draft.midlayer.mlp.up_proj.weight, layer) == (init == "target")
    with pytest.raises(ValueError, match="init='last'"):
        Eagle3Draft.from_target(llama, init="last")


def test_a_head_wider_than_its_share_of_the_width(tmp_path):
    config = tiny_target().config
    config.head_dim = 16  # 4 heads of 16 in a width of 32
    target = type(tiny_target())(config).eval()
    draft = tiny_draft(target)
    assert draft.config.head_dim == 16 and draft.midlayer.self_attn.q_proj.weight.shape == (64, 64)
    draft.save_pretrained(tmp_path)
    loaded = AutoDraft.from_pretrained(tmp_path, target=target)
    ids = torch.randint(3, 64, (1, 8))
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant_model=loaded, **kwargs))
