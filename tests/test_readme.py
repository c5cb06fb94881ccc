# SPDX-License-Identifier: Apache-2.0
"""
Every block of the README runs: Python in the order of the page and commands, on tiny models in the place of those it names.

Blocks marked `<!-- ci: .. -->` are run as they stand by `.ci/run`.
"""

import importlib.util
import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gto_hf
from gto_hf.cli import main
from gto_hf.quickstart import Budget, training, write_table
from tests.data.test_server import Fake
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(<!-- ci: (?P<ci>[\w-]+) -->\n)?```(?P<kind>\w*)\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]
# What a reader would put in: names of the page to folders of the fixture.
STANDS_FOR = {
    "meta-llama/Llama-3.1-8B-Instruct": "llm",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "draft",
    "Qwen/Qwen3-0.6B": "small",
    "path/to/llm": "llm",
    "path/to/draft": "draft",
    "path/to/published-draft": "draft",
    "me/my-draft": "pushed",
    "load_target()": "load_target('llm')",
    "shipped_draft()": "'draft'",
}
# Less work than the defaults; the options of the page are kept.
LESS = {
    "eval": ["--questions", "1", "--max-new-tokens", "8", "--dtype", "float32"],
    "train": ["--max_steps", "1", "--bf16", "False", "--report_to", "none", "--num_groups", "1", "--group_size", "4"],
    "regenerate": ["--max-new-tokens", "8", "--dtype", "float32"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with what the page names in it."""
    target = tiny_target()
    target.save_pretrained(tmp_path / "llm")
    tiny_tokenizer().save_pretrained(tmp_path / "llm")
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    tiny_draft(target).save_pretrained(tmp_path / "my-draft")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 2})).save_pretrained(
        tmp_path / "small"
    )
    rows = [json.dumps(row) for row in written_rows(target, 4, 24)]
    for name in ("chats.jsonl", "answers.jsonl"):
        (tmp_path / name).write_text("\n".join(rows))
    prompts = [json.dumps({"prompt": text}) for text in ("ABCDEF", "GHIJ")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(code):
    for name, stand_in in STANDS_FOR.items():
        code = code.replace(name, stand_in)
    return code


def commands(code):
    return [shlex.split(line) for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_block_is_run_somewhere():
    """By `.ci/run` if it is marked, else by a test below, which fails at what it cannot run."""
    assert TEXT.count("```") == 2 * len(BLOCKS)
    ci = (ROOT / ".ci" / "run").read_text()
    marked = [block["ci"] for block in BLOCKS if block["ci"]]
    assert sorted(marked) == sorted(re.search(r"for step in (.+); do", ci)[1].split())
    assert len(marked) == TEXT.count("<!-- ci:")
    for block in BLOCKS:
        picture = block["kind"] == "" and "──►" in block["code"]
        assert block["kind"] in ("python", "bash") or picture, block["code"]
        assert block["kind"] == "bash" or not block["ci"], block["code"]


def test_python_blocks_run_in_the_order_of_the_page(place, monkeypatch, capsys):
    made = gto_hf.GTOConfig

    def small(*args, **kwargs):
        """The page's options, and one short step."""
        less = {
            "max_steps": 1,
            "num_groups": 1,
            "group_size": 4,
            "report_to": "none",
            "per_device_train_batch_size": 2,
        }
        return made(*args, **{**less, **kwargs})

    monkeypatch.setattr(gto_hf.trainer, "GTOConfig", small)
    # A repository is a folder here; tests/hub has a Hub.
    monkeypatch.setattr(gto_hf.DraftModel, "push_to_hub", lambda draft, name: draft.save_pretrained(name))
    space = {}
    for block in BLOCKS:
        if block["kind"] == "python":
            code = filled(block["code"]).replace("max_new_tokens=100", "max_new_tokens=12")
            exec(compile(code, "README.md", "exec"), space)
    out = capsys.readouterr().out
    assert "known tokens" in out and "Misalignment(" in out  # the section that draws
    assert gto_hf.AutoDraft.from_pretrained(place / "my-draft").config.trained_length == 24
    assert isinstance(space["draft"], gto_hf.CausalLMDraft)  # the last section's


def gto_hf_command(command, monkeypatch):
    name, options = command[1], command[1:]
    for file in Path().glob("answers.jsonl*"):
        if name == "regenerate":
            file.unlink()
    if "--server" not in command:
        return main([*options, *LESS.get(name, [])])
    with Fake() as server:
        place = options.index("--server") + 1
        assert options[place] == "http://localhost:8000/v1"
        options[place] = server.url
        ended = main([*options, "--max-new-tokens", "8"])
    assert server.requests
    return ended


def quickstart(command, monkeypatch):
    """The page's options on the tiny target, with less work, in this process."""
    spec = importlib.util.spec_from_file_location("readme_quickstart", ROOT / command[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    budget = Budget(answers=4, phase1_steps=1, phase2_steps=1, questions=1, max_new_tokens=8, exact_questions=1)
    monkeypatch.setattr(module, "Budget", lambda: budget)
    monkeypatch.setattr(training, "regenerate", partial(training.regenerate, max_new_tokens=8))
    monkeypatch.setattr(module, "evaluate", lambda options: ended.append(main(["eval", *options])))
    ended = []
    if "--table" in command:
        less = {"target": "llm", "draft": "draft", "questions": 1, "max_new_tokens": 8}
        monkeypatch.setattr(module, "write_table", partial(write_table, **less))
        module.main(command[2:])
        made = {path.name for path in Path("runs/quickstart/table").iterdir()}
        shown = set(re.findall(r"\(docs/img/(\w+\.png)\)", TEXT))
        # This draft may accept nothing, which leaves a picture out; test_eval_command.py has a run that makes all of them.
        assert {"results.md", "results.json", "tau_by_set.png", "speedup_by_tree.png"} <= made
        assert {name for name in made if name.endswith(".png")} <= shown and len(shown) == 4
        return 0
    module.main([*command[2:], "--target", "llm"])
    assert ended
    return max(ended)


RUN = {("gto-hf",): gto_hf_command, ("python", "examples/quickstart.py"): quickstart}


def test_commands_run_on_the_models_that_they_name(place, monkeypatch, capsys):
    ran = []
    for block in BLOCKS:
        if block["kind"] != "bash" or block["ci"]:
            continue
        for command in commands(filled(block["code"])):
            runners = [run for words, run in RUN.items() if tuple(command[: len(words)]) == words]
            assert runners, f"no test runs {command}; write a runner, or mark the block for .ci/run"
            assert runners[0](command, monkeypatch) == 0, (command, capsys.readouterr().err)
            ran.append(" ".join(command))
    for some in (
        "gto-hf train",
        "gto-hf eval",
        "gto-hf export",
        "gto-hf convert",
        "regenerate --server",
        "py --train",
    ):
        assert any(some in command for command in ran), some


def test_the_first_screen_has_use_training_and_results():
    first = "\n".join(TEXT.splitlines()[:45])
    for part in ("pip install", "assistant_model=draft", "trainer.train()", "| plain generate |", "| shipped draft |"):
        assert part in first, part


def test_links_lead_somewhere():
    for address in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", TEXT):
        assert address.startswith("http") or (ROOT / address).exists(), address
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([\w-]+)\)", TEXT):
        assert anchor in headings, anchor
