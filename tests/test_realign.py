# SPDX-License-Identifier: Apache-2.0
"""The steps of docs/realign.md in their order, on tiny models in the place of those it names."""

import json
import re
import shlex
from pathlib import Path

import torch

from gto_hf import AutoDraft
from gto_hf.cli import main
from tests.test_readme import BLOCK, LESS, commands
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer


TEXT = (Path(__file__).parent.parent / "docs" / "realign.md").read_text()


def test_the_steps_of_the_page_run_in_its_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target, tokenizer = tiny_target(), tiny_tokenizer()
    published = tiny_draft(target)
    published.config.trained_length = 24
    published.save_pretrained("published")
    for parameter in target.parameters():  # the fine-tuning
        parameter.data += 0.02 * torch.randn_like(parameter)
    target.save_pretrained("moved")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained("moved")
    prompts = [json.dumps({"id": str(i), "prompt": text}) for i, text in enumerate(("ABCDEF", "GHIJ"))]
    Path("prompts.jsonl").write_text("\n".join(prompts))

    def run(command):
        assert main([*command[1:], *LESS[command[1]]]) == 0, (command, capsys.readouterr().err)

    def weights(folder):
        return AutoDraft.from_pretrained(folder).fc.weight

    adapter = shlex.split(re.search(r"`(--use_peft [^`]+)`", TEXT)[1])
    done = []
    for block in BLOCK.finditer(
        TEXT.replace("org/draft", "published").replace("max_new_tokens=512", "max_new_tokens=16")
    ):
        kind, code = block["kind"], block["code"]
        if kind == "bash":
            for command in commands(code):
                run(command)
                done.append(command)
        elif "PeftModel" in code:  # instead of the command before
            assert not torch.equal(weights("realigned"), weights("published"))
            first = weights("realigned")
            run([*done[-1], *adapter])
            exec(compile(code, "realign.md", "exec"), {})
            assert not torch.equal(weights("realigned"), first)
        else:
            exec(compile(code, "realign.md", "exec"), {})
            assert len(Path("rows.jsonl").read_text().splitlines()) == 2
    assert [command[1] for command in done] == ["eval", "train", "train", "eval"]
    last = AutoDraft.from_pretrained("realigned-gto")
    assert torch.equal(last.d2t, published.d2t) and torch.equal(last.t2d, published.t2d)
    assert not torch.equal(last.fc.weight, weights("realigned"))
