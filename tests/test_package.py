# SPDX-License-Identifier: Apache-2.0
"""The package as a user meets it: import, public names, command line, shipped data."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest
import torch

import gto_hf
from gto_hf.cli import main
from gto_hf.data import load_jsonl
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


def test_import_is_light_and_brings_neither_trl_nor_peft():
    code = "import sys, gto_hf; print([m for m in ('trl', 'peft', 'datasets', 'evaluate') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_import_changes_two_methods_and_registers_one_model_type():
    """All that `import gto_hf` changes in transformers, by comparing before and after in a fresh process."""
    code = """
import json
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationMixin, Trainer
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto

def auto():
    found = {"configs": set(configuration_auto.CONFIG_MAPPING.keys())}
    for name, value in vars(modeling_auto).items():
        if isinstance(value, auto_factory._LazyAutoMapping):
            found[name] = {config.__name__ for config in value._extra_content}
    return found

def methods():
    return {(cls.__name__, name): value for cls in (GenerationMixin, Trainer, AutoConfig, AutoModel, AutoModelForCausalLM)
            for name, value in vars(cls).items()}

mappings, before = auto(), methods()
import gto_hf
changed = sorted(name for name, value in methods().items() if before.get(name) is not value)
new = {name: sorted(after - mappings[name]) for name, after in auto().items() if after != mappings[name]}
gto_hf.uninstall()
print(json.dumps([changed, new, [value is before[name] for name, value in methods().items()].count(False)]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    changed, new, left = json.loads(out.stdout)
    assert changed == [["GenerationMixin", name] for name in ("_assisted_decoding", "_validate_generation_mode")]
    assert new == {
        "configs": ["gto_draft"],
        "MODEL_MAPPING": ["DraftConfig"],
        "MODEL_FOR_CAUSAL_LM_MAPPING": ["DraftConfig"],
    }
    assert left == 0


def test_every_public_name_exists():
    assert len(gto_hf.__all__) <= 24
    for name in gto_hf.__all__:
        assert getattr(gto_hf, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = gto_hf.nothing


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert gto_hf.__version__ == version("gto-hf")


def test_version_command(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"gto-hf {gto_hf.__version__}\n")


def test_python_dash_m_is_the_command():
    out = subprocess.run([sys.executable, "-m", "gto_hf", "version"], capture_output=True, text=True, check=True)
    assert "transformers" in out.stdout


@pytest.fixture
def folders(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    draft = tiny_draft(target)
    draft.save_pretrained(tmp_path / "draft")
    rows = written_rows(target, 6, 24)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    questions = [{"prompt": "ABCDEF"}, {"turns": ["GHIJ", "KLM"]}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return tmp_path


def test_train_command_tunes_a_draft_and_makes_a_fresh_one(folders):
    common = [
        "train", "--target_model_name_or_path", f"{folders}/target", "--dataset_name", f"{folders}/rows.jsonl",
        "--max_steps", "1", "--bf16", "False", "--report_to", "none", "--tree_depth", "3", "--tree_top_k", "3",
        "--tree_total_tokens", "8", "--group_size", "3", "--disable_tqdm", "True",
    ]  # fmt: skip
    tuned = [*common, "--model_name_or_path", f"{folders}/draft", "--output_dir", f"{folders}/tuned"]
    assert main(tuned) == 0
    again = gto_hf.AutoDraft.from_pretrained(folders / "tuned")
    assert torch.equal(again.d2t, gto_hf.AutoDraft.from_pretrained(folders / "draft").d2t)
    # every token of this tokenizer is a byte, so all of them are kept
    assert main([*common, "--draft_vocab_size", "1000", "--output_dir", f"{folders}/fresh"]) == 0
    assert gto_hf.AutoDraft.from_pretrained(folders / "fresh").config.draft_vocab_size == 64


def test_eval_command_prints_a_table_and_writes_counts(folders, capsys):
    code = main(
        [
            "eval", "--target", f"{folders}/target", "--draft", f"{folders}/draft", "--sets",
            f"{folders}/questions.jsonl", "--temperature", "0,1", "--max-new-tokens", "8", "--dtype", "float32",
            "--output", f"{folders}/out.json",
        ]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0 and "| 1 | plain generate |" in out and "3 of 3" in out and "prompts hash" in out
    saved = json.loads((folders / "out.json").read_text())
    assert len(saved["runs"]) == 4 and saved["runs"][1]["answers"][0]["statistics"]["rounds"] > 0


def test_errors_are_one_line_and_an_exit_code(folders, capsys):
    assert main(["eval", "--target", f"{folders}/target", "--draft", f"{folders}/target"]) == 1
    assert "gto-hf: error:" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["eval"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["train", "--output_dir", f"{folders}/x"])
    assert stop.value.code == 2


def test_shipped_data_is_complete_and_held_out():
    assets = files("gto_hf") / "assets"
    questions = load_jsonl(assets / "questions.jsonl")
    prompts = load_jsonl(assets / "train_prompts.jsonl")
    answers = load_jsonl(assets / "train_answers.jsonl")
    assert len(questions) == 90 and len(prompts) >= 300
    assert {a["id"] for a in answers} <= {p["id"] for p in prompts}
    assert sum((assets / n).stat().st_size for n in ("train_answers.jsonl", "train_prompts.jsonl")) <= 2 * 2**20
    asked = {turn.strip().lower() for q in questions for turn in q["turns"]}
    assert not asked & {p["prompt"].strip().lower() for p in prompts}
