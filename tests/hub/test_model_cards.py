# SPDX-License-Identifier: Apache-2.0
"""The cards in `model_cards/`: they parse, their commands are commands, and no template claims a figure."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from trl import ModelConfig, ScriptArguments, TrlParser

from gto_hf import DraftConfig, GTOConfig, TreeConfig
from gto_hf.data import regenerate_script
from gto_hf.evaluation import script as eval_script
from gto_hf.hub import draft_card, read_results
from gto_hf.hub import script as card_script
from gto_hf.hub.card import MARK
from gto_hf.trainer.script import DraftArguments


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "model_cards"
CARDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
TEMPLATES = [path for path in CARDS if path.stem != "smollm2-135m"]
# The newest options of `gto-hf eval` for trees beside the draft's own.
TREE_OPTIONS = {"--tree-sizes", "8x1x8", "5x1x5"}


def commands(text):
    """Every shell command of a text, as words."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line and not line.startswith("#")]


def test_every_target_of_the_paper_has_a_template():
    assert [path.stem for path in TEMPLATES] == [
        "deepseek-r1-distill-llama-8b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "vicuna-13b",
    ]  # fmt: skip
    readme = (FOLDER / "README.md").read_text()
    assert all(f"]({path.name})" in readme for path in CARDS)


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_parses_and_names_what_hubs_need(path):
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert data["library_name"] == "gto-hf" and data["base_model"]
    assert {"gto", "speculative-decoding", "eagle-3"} <= set(data["tags"])
    assert ModelCard(card.content).data.to_dict() == data
    for code in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL):
        compile(code, path.name, "exec")
    for spec in re.findall(r"--speculative-config '([^']+)'", card.text):
        assert json.loads(spec).keys() == {"method", "model", "num_speculative_tokens"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_claims_no_figure(path):
    card = ModelCard.load(path)
    assert card.data.eval_results is None and MARK not in card.text
    section = card.text.split("## What it saves")[1].split("## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    head = rows[0]
    filled = [row for row in rows if row[0] in ("0", "1")]
    assert len(filled) == 6
    for row in filled:
        described = 3 if len(row) == len(head) else 2  # temperature, tree or chain, and its shape
        assert all(row[:described]) and not any(row[described:])
    assert not re.search(r"\d+\.\d", re.sub(r"\|.*", "", section))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_templates_commands_are_those_of_the_program(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = ModelCard.load(path)
    draft, target = card.data.base_model
    found = {words[words.index("gto_hf") + 1 if "gto_hf" in words else 1]: words for words in commands(card.text)}
    words = found["train"]
    assert words[:3] == ["accelerate", "launch", "--config_file"] and (ROOT / words[3]).exists()
    parser = TrlParser((ScriptArguments, GTOConfig, ModelConfig, DraftArguments))
    arguments = words[words.index("train") + 1 :]
    arguments[arguments.index("--bf16") + 1] = "False"  # not every machine has it
    script, args, model, _ = parser.parse_args_and_config(arguments)
    assert (model.model_name_or_path, args.target_model_name_or_path) == (draft, target)
    assert script.dataset_name == "answers.jsonl"
    assert args.tree(TreeConfig()) == TreeConfig(8, 10, 59) and (args.num_groups, args.group_size) == (16, 8)
    assert (args.learning_rate, args.gto_weight, args.num_train_epochs, args.max_grad_norm) == (5e-6, 0.5, 5, 0.5)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.warmup_steps) == (0.9, 0.95, 0, 1000)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 2
    for name, module in (("regenerate", regenerate_script), ("eval", eval_script), ("card", card_script)):
        parsed = parse(module, found[name])
        assert getattr(parsed, "target", None) in (target, None)
    assert parse(card_script, found["card"]).draft == args.output_dir
    assert parse(eval_script, found["eval"]).draft == [f"gto={args.output_dir}"]
    name = re.escape(parse(card_script, found["card"]).name)
    assert re.search(rf'AutoDraft\.from_pretrained\(\s*"{name}"', card.text)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_templates_training_is_the_recipes(path):
    words = next(words for words in commands(path.read_text()) if "train" in words)
    given = dict(zip(words[words.index("train") + 1 :: 2], words[words.index("train") + 2 :: 2], strict=True))
    stem = path.stem.replace("deepseek-r1-distill-llama-8b", "deepseek-r1-8b")
    recipe = yaml.safe_load((ROOT / "examples" / "paper" / f"{stem}.yaml").read_text())
    for name, value in given.items():
        if name.lstrip("-") not in ("dataset_name", "output_dir"):
            assert yaml.safe_load(value) == recipe[name.lstrip("-")] or float(value) == recipe[name.lstrip("-")], name
    page = (ROOT / "docs" / "reproduce.md").read_text()
    memory = int(re.search(r"^Memory: about (\d+) GiB", path.read_text(), re.MULTILINE)[1])
    assert any(abs(float(size) - memory) < 0.6 for size in re.findall(r"([\d.]+) GiB", page))


def parse(module, words):
    """Arguments of a command; only trees of `eval` may be unknown."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parsed, unknown = parser.parse_known_args(words[2:])
    assert set(unknown) <= TREE_OPTIONS
    return parsed


def test_the_shipped_drafts_card_is_what_the_command_writes(tmp_path):
    """From the draft's config, the record of its training and, once there is one, the measurement beside the card."""
    text = (FOLDER / "README.md").read_text().split("## Finished")[1]
    words = next(words for words in commands(text) if words[:2] == ["gto-hf", "card"])
    args = parse(card_script, words)
    results = [r for path in args.results if (ROOT / path).exists() for r in read_results(ROOT / path)]
    config = DraftConfig.from_pretrained(ROOT / args.draft)
    card = draft_card(
        config,
        name=args.name,
        license=args.license,
        base_model=args.target,
        training=json.loads((ROOT / args.training).read_text()),
        results=results,
    )
    written = ModelCard.load(ROOT / args.output)
    assert written.content.strip() == card.content.strip()
    assert ("have not been measured" in written.text) == (not results)
