# SPDX-License-Identifier: Apache-2.0
"""
Exports in the real vLLM, run where `GTO_VLLM_PYTHON` names a Python that has it (vLLM 0.32 for CPU was used).

It wants another transformers than this package, so it runs in a process of its own.
"""

import json
import os
import subprocess

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gto_hf import Eagle3Draft, TreeConfig, count_tokens
from gto_hf.export import export
from tests.tiny import VOCAB, memorised_rows, tiny_tokenizer, train_tiny


PYTHON = os.environ.get("GTO_VLLM_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="GTO_VLLM_PYTHON names no Python with vLLM")]
TOKENS, NEW = 3, 40
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
target, draft, prompts = json.loads(sys.argv[1])
llm = LLM(model=target, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=False,
          speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3})
wanted = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
texts = [list(llm.generate([{"prompt_token_ids": p}], wanted)[0].outputs[0].token_ids) for p in prompts]
counts = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num") and hasattr(m, "value")}
print("RESULT" + json.dumps([texts, counts]))
"""


@pytest.mark.parametrize(
    "engine, fields",
    [
        ("vllm", {}),
        ("speculators", {}),
        ("vllm", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}),
        ("vllm", {"feature_layers": [1, 3, 5, 7], "num_hidden_layers": 2}),
    ],
)
def test_vllm_accepts_the_tokens_that_a_chain_accepts_here(tmp_path, engine, fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config).eval()
    target.lm_head.weight.data *= 8
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    rows, prompts = memorised_rows(target, count=3, length=40)
    counts = count_tokens([row["input_ids"] for row in rows], VOCAB)
    draft = Eagle3Draft.from_target(target, draft_vocab_size=48, token_counts=counts, **fields)
    train_tiny(draft, target, rows, steps=60)
    export(draft, tmp_path / "draft", engine, target=target, target_name="org/tiny")

    draft.tree = TreeConfig(TOKENS, 1, TOKENS)
    expected, accepted = [], 0
    for prompt in prompts:
        output = target.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=draft,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        expected.append(output.sequences[0, len(prompt) :].tolist())
        accepted += output.statistics.accepted_tokens
    asked = json.dumps([str(tmp_path / "target"), str(tmp_path / "draft"), prompts.tolist()])
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    settings |= {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    (tmp_path / "serve.py").write_text(SCRIPT)
    command = [PYTHON, str(tmp_path / "serve.py"), asked]
    run = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    texts, found = json.loads(run.stdout.split("RESULT")[1])
    assert texts == expected
    # The last round of a text may be counted whole by one and cut by the other.
    assert accepted > 10 and abs(found["vllm:spec_decode_num_accepted_tokens"] - accepted) <= TOKENS * len(prompts)
