# SPDX-License-Identifier: Apache-2.0
"""What others added to EAGLE-3: each option, and all together, against a plain reading of the weights."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gto_hf import AutoDraft, DraftConfig, Eagle3Draft
from gto_hf.drafts import DraftPrefix, NodeSteps
from gto_hf.gto import SequencePrefix
from gto_hf.lora import draft_peft_config
from gto_hf.quickstart import shipped_draft
from tests.drafts.test_eagle3 import sequences
from tests.gto.test_step import test_the_training_tree_is_the_decoding_tree as same_trees
from tests.reference.naive_eagle3 import NaiveEagle3, PathModel
from tests.reference.naive_tree import naive_tree
from tests.tiny import TREE, memorised_rows, tiny_draft, tiny_target, train_tiny, written_rows
from tests.trainer.helpers import make


PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
OPTIONS = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "fc_bias": {"fc_bias": True},
    "qk_norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 3},
    "partial rotary": PARTIAL,
    "one feature": {"feature_layers": [4]},
    "four features": {"feature_layers": [1, 3, 5, 8]},
    "two layers": {"num_hidden_layers": 2},
}
# Of the two norms before the fusion only one can be had.
ALL = {k: v for name, option in OPTIONS.items() if name not in ("fc_norm", "one feature") for k, v in option.items()}
THREE_ONE = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 6}
CASES = {
    **OPTIONS,
    "all": ALL,
    "all with fc_norm": {**ALL, "norm_before_fc": False, "fc_norm": True},
    "3.1": THREE_ONE,
}


def variant(target, options, seed=1):
    """A draft with these options whose norms and biases are not at their neutral starting values."""
    torch.manual_seed(seed)
    counts = torch.arange(64, 0, -1)
    draft = Eagle3Draft.from_target(target, draft_vocab_size=48, token_counts=counts, tree=TREE, **options).eval()
    for name, parameter in draft.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return draft


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_a_plain_reading_of_the_weights(llama, name):
    draft, target = variant(llama, CASES[name]).double(), llama.double()
    ids = torch.randint(3, 48, (2, 12))
    batch = sequences(target, draft, ids)
    roots = torch.tensor([[3, 8], [1, 6]])
    ours = SequencePrefix(draft, batch).unrolled_logits(roots, 4)
    naive = NaiveEagle3(draft, target.get_input_embeddings().weight.detach())
    for b in range(2):
        for n, t in enumerate(roots[b].tolist()):
            row = ids[b].tolist()
            expected = naive.logits(batch.features[b, :t], row[: t + 1], row[t + 1 : t + 4])
            for k in range(4):
                torch.testing.assert_close(ours[k][b, n], expected[k], atol=1e-6, rtol=1e-5)
    weights = torch.randn(4, 48, dtype=torch.float64)
    parameters = [p for p in draft.parameters() if p.requires_grad]

    def gradients(logits):
        value = sum((w * x).sum() for w, x in zip(weights, logits, strict=True))
        return torch.autograd.grad(value, parameters)

    mine = gradients([x[0, 1] for x in ours])
    row = ids[0].tolist()
    theirs = gradients(naive.logits(batch.features[0, :8], row[:9], row[9:12]))
    for (key, _), a, b in zip(draft.named_parameters(), mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(
    "name", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "window"]
)
def test_every_option_changes_what_the_draft_says(llama, name):
    """With the same weights otherwise: an option that nothing reads would pass every other test of equality."""
    with_option, without = variant(llama, OPTIONS[name]), tiny_draft(llama)
    shared = {k: v for k, v in with_option.state_dict().items() if k in without.state_dict()}
    without.load_state_dict(shared)
    batch = sequences(llama, without, torch.randint(3, 48, (1, 12)))
    with torch.no_grad():
        a, b = (SequencePrefix(d, batch).unrolled_logits(torch.tensor([[8]]), 2)[1] for d in (with_option, without))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["window", "all", "3.1"])
def test_a_tree_is_the_plain_readings_tree(llama, name):
    """Nodes are siblings and cousins of one depth: windows must count positions, not slots."""
    draft, target = variant(llama, CASES[name]).double(), llama.double()
    ids = torch.randint(3, 48, (1, 10))
    batch = sequences(target, draft, ids)
    with torch.no_grad():
        tree = SequencePrefix(draft, batch).grow(torch.tensor([[9]]), TREE)
        naive = NaiveEagle3(draft, target.get_input_embeddings().weight)
        model = PathModel(naive, batch.features[0, :9], ids[0].tolist())
        expected = naive_tree(model, 0, int(ids[0, 9]), TREE.depth, TREE.top_k, TREE.total_tokens)
    assert tree.tokens[0].tolist() == expected["tokens"] and tree.parents[0].tolist() == expected["parents"]
    torch.testing.assert_close(tree.scores[0].tolist(), expected["scores"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["window", "3.1", "all"])
def test_the_training_tree_is_the_decoding_tree(llama, name):
    """Decoding reads the text piece by piece, in columns that may move; training all at once."""
    same_trees((llama, variant(llama, CASES[name]), torch.randint(3, 48, (1, 7))))


@pytest.mark.parametrize("name", ["window", "two layers", "3.1", "all"])
def test_padding_and_ragged_rows_change_nothing(llama, name):
    draft = variant(llama, CASES[name])
    rows = [torch.randint(3, 48, (1, n)) for n in (14, 9)]
    ids, valid = torch.zeros(2, 14, dtype=torch.long), torch.zeros(2, 14, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, 14 - row.shape[1] :], valid[i, 14 - row.shape[1] :] = row[0], True
    with torch.no_grad():
        together = SequencePrefix(draft, sequences(llama, draft, ids, valid))
        roots = torch.tensor([[5, 8]])
        shifted = torch.cat([roots + 14 - row.shape[1] for row in rows])
        batched = together.unrolled_logits(shifted, 3)
        for i, row in enumerate(rows):
            alone = SequencePrefix(draft, sequences(llama, draft, row)).unrolled_logits(roots, 3)
            for a, b in zip(alone, batched, strict=True):
                torch.testing.assert_close(a[0], b[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["window", "two layers", "all"])
def test_columns_that_move_keep_their_positions(llama, name):
    """Rows of a batch grow unequally; closing the gaps must not change what nodes below them see."""
    draft = variant(llama, CASES[name])
    prefix = DraftPrefix(draft)
    valid = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1]]).bool()
    positions = valid.long().cumsum(1) - 1
    features = torch.randn(2, 12, draft.config.target_hidden_size * len(draft.config.feature_layers))
    tokens, features_below = torch.randint(3, 48, (2, 2)), torch.randn(2, 2, 32)

    def below():
        last = positions.amax(1)
        steps = NodeSteps(prefix, last, prefix.valid)
        return steps.forward(tokens, features_below, torch.eye(2, dtype=torch.bool).expand(2, 2, 2), 1)

    with torch.no_grad():
        prefix.extend(features, torch.randint(3, 48, (2, 12)), positions, valid)
        before = below()
        prefix.drop_holes()
        assert prefix.valid.shape[1] == 5
        torch.testing.assert_close(below(), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["3.1", "all"])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_is_lossless(llama, name, rows):
    draft = variant(llama, CASES[name])
    prompt = torch.randint(3, 64, (rows, 9))
    mask = torch.ones_like(prompt)
    mask[-1, : 3 * (rows > 1)] = 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama.generate(prompt, assistant_model=draft, **kwargs), llama.generate(prompt, **kwargs))


def test_a_3_1_draft_learns_and_is_accepted():
    """It trains, and what it learned is what decoding uses: a window or norm applied in one of them only would show."""
    target = tiny_target("llama")
    rows, prompts = memorised_rows(target)
    torch.manual_seed(1)
    draft = Eagle3Draft.from_target(
        target, draft_vocab_size=60, token_counts=torch.arange(64, 0, -1), tree=TREE, qk_norm=True, **THREE_ONE
    )
    train_tiny(draft, target, rows, steps=120)
    output = target.generate(
        prompts[:1], attention_mask=torch.ones_like(prompts[:1]), assistant_model=draft, do_sample=False,
        max_length=60, eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences[0].tolist() == rows[0]["input_ids"]
    assert output.statistics.tau > 1.5


def test_gradient_checkpointing_changes_no_gradient(llama):
    draft = variant(llama, ALL)
    batch = sequences(llama, draft, torch.randint(3, 48, (1, 12)))
    grads = []
    for checkpointing in (False, True):
        model = copy.deepcopy(draft).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        steps = SequencePrefix(model, batch).unrolled_logits(torch.tensor([[2, 6]]), 3)
        sum(x.square().sum() for x in steps).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------- config and folders
@pytest.mark.parametrize("name", CASES)
def test_a_saved_draft_is_itself_again(llama, tmp_path, name):
    draft = variant(llama, CASES[name])
    draft.save_pretrained(tmp_path)
    again = AutoDraft.from_pretrained(tmp_path, target=llama)
    batch = sequences(llama, draft, torch.randint(3, 48, (1, 10)))
    with torch.no_grad():
        pairs = [SequencePrefix(d, batch).unrolled_logits(torch.tensor([[6]]), 3) for d in (draft, again)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_the_format_version_rises_only_where_an_older_reader_would_err(llama, tmp_path):
    for name, options in {**CASES, "plain": {}}.items():
        variant(llama, options).save_pretrained(tmp_path / name)
        version = json.loads((tmp_path / name / "config.json").read_text())["format_version"]
        old_knows = name in ("plain", "one feature", "four features", "two layers")  # or refuses by itself
        assert version == (1 if old_knows else 2), name


def test_a_folder_of_version_1_says_nothing_of_the_options(llama, tmp_path):
    draft = tiny_draft(llama)
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    added = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias", "qk_norm", "source",
             "attention_output_bias", "sliding_window")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in added}))
    again = AutoDraft.from_pretrained(tmp_path)
    assert again.config.format_version == 1 and not any(getattr(again.config, name) for name in added)
    assert again.state_dict().keys() == draft.state_dict().keys()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"head_dim": 7}, "must be an even number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "12 of"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}}, "3 of"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_contradicting_options_are_refused(llama, change, words):
    with pytest.raises(ValueError, match=words):
        DraftConfig(**(tiny_draft(llama).config.to_dict() | change))


def test_a_stack_starts_as_the_targets_last_layers(llama):
    draft = Eagle3Draft.from_target(llama, num_hidden_layers=3)
    layers = llama.model.layers
    assert torch.equal(draft.midlayer.self_attn.k_proj.weight[:, 32:], layers[5].self_attn.k_proj.weight)
    assert torch.equal(draft.layers["1"].self_attn.k_proj.weight, layers[6].self_attn.k_proj.weight)
    assert torch.equal(draft.layers["2"].mlp.down_proj.weight, layers[7].mlp.down_proj.weight)
    norms = tiny_target("qwen3")
    norms.model.layers[-1].self_attn.q_norm.weight.data.uniform_(0.5, 2)
    assert torch.equal(
        Eagle3Draft.from_target(norms, qk_norm=True).midlayer.self_attn.q_norm.weight,
        norms.model.layers[-1].self_attn.q_norm.weight,
    )


def test_phase_2_trains_an_adapter_on_it_that_loads_again(llama, tmp_path):
    draft = variant(llama, ALL)
    draft.save_pretrained(tmp_path / "base")
    base = AutoDraft.from_pretrained(tmp_path / "base")
    rows = written_rows(llama, 4, 20)
    trainer = make(base, llama, rows, tmp_path / "run", peft_config=LoraConfig(r=4), max_steps=2, learning_rate=1e-2)
    trainer.train()
    assert any("gto_loss" in entry or "tree" in " ".join(entry) for entry in trainer.state.log_history)
    trainer.save_model()
    again = AutoDraft.from_pretrained(tmp_path / "run", target=llama)
    batch = sequences(llama, again, torch.randint(3, 48, (1, 10)))
    trained = trainer.model.get_base_model().eval()
    with torch.no_grad():
        a, b, c = (
            SequencePrefix(d.attach(llama), batch).unrolled_logits(torch.tensor([[6]]), 2)[1]
            for d in (trained, again, draft)
        )
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (b - c).abs().max() > 1e-3  # it did learn something


def test_the_shipped_draft_is_of_the_first_format():
    config = AutoDraft.from_pretrained(shipped_draft()).config
    assert config.format_version == 1 and not config.norm_output and config.source is None


def test_lora_adapts_every_projection_and_no_norm(llama):
    draft = variant(llama, ALL)
    model = get_peft_model(draft, draft_peft_config(LoraConfig(r=2), draft))
    adapted = {
        n.split(".lora_A")[0].removeprefix("base_model.model.") for n, _ in model.named_parameters() if "lora_A" in n
    }
    stems = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert adapted == {"fc"} | {f"{layer}.{stem}" for layer in ("midlayer", "layers.1") for stem in stems}
