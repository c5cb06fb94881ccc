# SPDX-License-Identifier: Apache-2.0
"""Rows that a tiny target wrote."""

import pytest
import torch


@pytest.fixture
def rows(llama):
    torch.manual_seed(2)
    prompts = torch.randint(3, 40, (3, 3))
    out = llama.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_length=18, eos_token_id=None
    ).tolist()
    return [out[0], out[1][:13], out[2][:16]]
