# SPDX-License-Identifier: Apache-2.0
"""Targets with quantized weights: never cast, moved or read as numbers; drafts start from what can be copied."""

import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from gto_hf import Eagle3Draft, GTOConfig, GTOTrainer
from tests.tiny import TREE, tiny_tokenizer, written_rows


def wide_target():
    """A random target that is wide enough for blocks of 64 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    target.lm_head.weight.data *= 8
    return target.eval()


def fresh(target):
    torch.manual_seed(1)
    return Eagle3Draft.from_target(target, draft_vocab_size=48, token_counts=torch.arange(64, 0, -1), tree=TREE)


def train(draft, target, folder, **kwargs):
    args = GTOConfig(
        str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, num_groups=2, group_size=3,
        tree_depth=3, tree_top_k=3, tree_total_tokens=8, report_to="none", disable_tqdm=True, save_strategy="steps",
        save_steps=2, logging_steps=1, **{"bf16": False, **kwargs},
    )  # fmt: skip
    rows = Dataset.from_list(written_rows(target, 8, 24))
    trainer = GTOTrainer(draft, target, args, train_dataset=rows, processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


class _Packed(nn.Module):
    """A linear layer whose weight is packed bytes with a scale, as 4-bit layers keep theirs."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = scale

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T


def packed_target():
    """A target whose layers and head are packed, that says it is quantized and refuses to be cast or moved."""
    target = wide_target()
    for module in list(target.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, _Packed(child))
    target.hf_quantizer = SimpleNamespace(is_compileable=False)
    target.config.quantization_config = {"quant_method": "packed"}

    def refuse(*args, **kwargs):
        raise AssertionError("a quantized target must stay as it was loaded")

    for name in ("to", "float", "half", "bfloat16", "cuda", "_apply"):
        setattr(target, name, refuse)
    return target


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gto_weight": 0.0}])
def test_a_packed_target_trains_a_draft_and_is_left_alone(tmp_path, options):
    target = packed_target()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    draft = fresh(target)
    start = copy.deepcopy(draft.state_dict())
    trainer = train(draft, target, tmp_path, **options)
    assert trainer.target_model is target
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in target.state_dict().items())
    moved = {k for k, v in draft.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == {k for k, _ in draft.named_parameters()}
    assert ("gto/ratio" in trainer.state.log_history[0]) == ("gto_weight" not in options)


def test_a_fresh_draft_copies_what_is_plain_and_nothing_packed():
    plain, packed = wide_target(), packed_target()
    copied, partly = fresh(plain), fresh(packed)
    assert torch.equal(copied.lm_head.weight, plain.lm_head.weight[copied.kept_ids])
    assert torch.equal(copied.midlayer.mlp.up_proj.weight, plain.model.layers[-1].mlp.up_proj.weight)
    # Random where the target is packed; the norms, which are not, are its own.
    for name in ("lm_head.weight", "midlayer.mlp.up_proj.weight"):
        weight = partly.get_parameter(name)
        assert weight.dtype == torch.float32 and not torch.equal(weight, copied.get_parameter(name))
        assert 0 < weight.std() < 0.05
    assert torch.equal(partly.norm.weight, copied.norm.weight)
    assert partly.config.target["quantization"] is None or partly.config.target["quantization"] == "packed"


@pytest.fixture(params=["torchao int8", "bitsandbytes nf4"])
def quantized(request, tmp_path):
    """A target loaded with real int8 or 4-bit weights on the CPU."""
    wide_target().save_pretrained(tmp_path / "target")
    if request.param == "torchao int8":
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", quantization_config=config, dtype=torch.float32
    ).eval()


def test_real_quantized_targets_train_and_decode(quantized, tmp_path):
    weight = quantized.model.layers[0].mlp.up_proj.weight
    kind, stored = type(weight), copy.deepcopy(weight)
    draft = fresh(quantized)
    assert draft.config.target["quantization"] in ("torchao", "bitsandbytes")
    # The head is close to the full one where it can be read at all.
    full = wide_target().lm_head.weight[draft.kept_ids]
    assert torch.cosine_similarity(draft.lm_head.weight.flatten(), full.flatten(), dim=0) > 0.99
    trainer = train(draft, quantized, tmp_path / "run")
    first, second = trainer.state.log_history[:2]
    assert first["gto/ratio"] == 1.0 and first["gto/advantage_abs"] == 0.0 and second["gto/advantage_abs"] > 0
    after = quantized.model.layers[0].mlp.up_proj.weight
    assert type(after) is kind and after.dtype == stored.dtype
    prompt = torch.randint(3, 64, (1, 6))
    kwargs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        quantized.generate(prompt, assistant_model=draft, **kwargs), quantized.generate(prompt, **kwargs)
    )
