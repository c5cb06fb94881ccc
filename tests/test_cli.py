# SPDX-License-Identifier: Apache-2.0
"""`gto-hf` from outside: help, version, exit codes, YAML files, `accelerate launch`, messages for what is wrong."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
import yaml
from datasets import Dataset

import gto_hf
from gto_hf import console, extras
from gto_hf.cli import main
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


def listed(out):
    """Commands that a help text lists."""
    return re.search(r"positional arguments:\s+\{([\w,]+)\}", out)[1].split(",")


def printed(argv, capsys):
    """Exit code and output of a call that argparse ends."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    found = capsys.readouterr()
    return stop.value.code or 0, found.out, found.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_draft(target).save_pretrained(folder / "draft")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, written_rows(target, 4, 24))))
    run = {
        "model_name_or_path": str(folder / "draft"), "target_model_name_or_path": str(folder / "target"),
        "dataset_name": str(folder / "rows.jsonl"), "max_steps": 1, "gto_weight": 0.0, "bf16": False,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "report": False,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def test_every_command_has_one_style_of_help(capsys):
    code, out, _ = printed(["--help"], capsys)
    assert code == 0 and "--version" in out and "--completion" in out
    calls = [[name] for name in listed(out)]
    for call in calls:
        code, out, _ = printed([*call, "--help"], capsys)
        text = " ".join(out.split())
        assert code == 0 and out.startswith(f"usage: gto-hf {' '.join(call)}"), call
        assert " ".join(console.EXIT_CODES.split()) in text, call
        assert "(default: None)" not in text and "(default: False)" not in text, call
        described = out.split("\n\n")[1]
        assert described[0].isupper() and described.rstrip().endswith((".", ")")), (call, described)
        if call == ["bench"]:
            calls += [["bench", name] for name in listed(out)]


def test_every_option_is_explained(monkeypatch):
    """argparse itself is asked, so that an option without a text is found in any command."""
    seen = []
    add = argparse._ActionsContainer.add_argument

    def spy(self, *names, **kwargs):
        if names and names[0].startswith("--") and kwargs.get("help") != argparse.SUPPRESS:
            seen.append((names[0], kwargs.get("help")))
        return add(self, *names, **kwargs)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", spy)
    for argv in (["version"], ["bench", "train", "--target", "x", "--lengths", "0"]):
        try:
            main(argv)
        except SystemExit:
            pass
    assert len(seen) > 40 and not [name for name, text in seen if not text]


def test_version_is_an_option_and_a_command(capsys):
    code, out, _ = printed(["--version"], capsys)
    assert (code, out) == (0, f"gto-hf {gto_hf.__version__}\n")
    assert main(["version"]) == 0
    assert "transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [[], ["nonsense"], ["eval"], ["draw", "--seed", "x"], ["train"], ["train", "--output_dir", "x", "--config"]],
)
def test_wrong_usage_is_2_and_shows_the_usage(argv, capsys):
    code, out, err = printed(argv, capsys)
    assert code == 2 and err.startswith("usage: gto-hf") and not out


@pytest.mark.parametrize(
    "error, code, shown",
    [
        (ValueError("`x` must be 1."), 1, "gto-hf: error: `x` must be 1.\n"),
        (FileNotFoundError(2, "No such file", "a.json"), 1, "gto-hf: error: [Errno 2] No such file: 'a.json'\n"),
        (FloatingPointError("NaN"), 1, "gto-hf: error: NaN\n"),
        (KeyboardInterrupt(), 130, "gto-hf: interrupted\n"),
        (None, 0, ""),
    ],
)
def test_exit_codes(error, code, shown, capsys):
    def action():
        if error is not None:
            raise error

    assert console.report(action) == code
    assert capsys.readouterr().err == shown


def test_a_bug_keeps_its_traceback():
    def bug():
        raise KeyError("who")

    with pytest.raises(KeyError):
        console.report(bug)


def test_wrong_paths_and_values_are_named_before_any_work(folder, capsys):
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    for argv, words in (
        (["check", "--target", "./nowhere", "--draft", str(folder / "draft")], ("./nowhere",)),
        (["check", "--target", str(folder / "target"), "--draft", "./nowhere"], ("`./nowhere`", "neither a folder")),
        (["check", "--target", str(folder / "target"), "--draft", str(folder / "target")], ("draft",)),
        (["eval", *models, "--sets", "nothing.jsonl"], ("nothing.jsonl",)),
        (["eval", *models, "--require-identical"], ("--dtype float32",)),
        (["draw", *models, "--file", "tree.txt"], ("tree.txt", ".svg")),
        (["draw", *models, "--file", "no/such/folder/tree.svg"], ("no/such/folder",)),
    ):
        assert main(argv) == 1, argv
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("gto-hf: error: ") and all(word in last for word in words), last


def test_a_truncated_target_is_one_line(folder, tmp_path, capsys):
    shutil.copytree(folder / "target", tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for command in (
        ["check", "--draft", str(folder / "draft")],
        ["regenerate", "--prompts", "own", "--output", f"{tmp_path}/a.jsonl"],
    ):
        assert main([*command, "--target", str(tmp_path / "target"), "--device", "cpu"]) == 1
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("gto-hf: error: the weights of a model are incomplete or damaged") and "again" in last


def test_a_yaml_file_holds_the_options_and_the_command_line_wins(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", "--config", str(folder / "run.yaml"), "--output_dir", str(out), "--learning_rate", "0"]) == 0
    tuned, before = (gto_hf.AutoDraft.from_pretrained(path) for path in (out, folder / "draft"))
    assert torch.equal(tuned.fc.weight, before.fc.weight)  # the rate 0 of the command line, steps of the file
    assert torch.load(out / "training_args.bin", weights_only=False).max_steps == 1
    capsys.readouterr()


def test_every_other_command_reads_its_options_from_a_yaml_file_too(folder, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "ABC"}\n{"prompt": "DEF"}\n')
    common = {"target": str(folder / "target"), "dtype": "float32", "device": "cpu"}
    pair = {**common, "draft": str(folder / "draft"), "sets": str(questions)}
    runs = {
        "eval": {**pair, "draft": [f"a={folder}/draft"], "temperature": [0, 1], "max-new-tokens": 2, "questions": 1},
        "bench decode": {**pair, "max_new_tokens": 2, "trees": ["1x2x2"], "no-memory": True},
        "check": {**pair, "full": False},
        "draw": {**pair, "max_new_tokens": 4, "prompt": "AB"},
        "regenerate": {
            **common,
            "prompts": str(questions),
            "output": f"{tmp_path}/a.jsonl",
            "max_new_tokens": 2,
            "greedy": True,
        },
        "convert": {"dtype": "float32"},
        "export": {"to": "sglang", "target": str(folder / "target"), "output": f"{tmp_path}/exported"},
        "card": {"output": f"{tmp_path}/card.md", "name": "me/draft"},
    }
    for command, options in runs.items():
        file = tmp_path / f"{command.split()[0]}.yaml"
        file.write_text(yaml.safe_dump(options))
        positional = [str(folder / "draft")] if command in ("convert", "export", "card") else []
        positional += [str(tmp_path / "converted")] if command == "convert" else []
        assert main([*command.split(), *positional, "--config", str(file)]) == 0, (command, capsys.readouterr())
    printed_all = capsys.readouterr().out
    assert "| 1 | a |" in printed_all and "tree 1/2/2" in printed_all and (tmp_path / "card.md").exists()
    # What is given here wins, also over a list.
    argv = ["eval", "--config", str(tmp_path / "eval.yaml"), "--temperature", "0", "--draft", f"b={folder}/draft"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "| 0 | b |" in out and "| a |" not in out and "| 1 |" not in out


def test_values_of_a_yaml_file_become_words_of_the_command_line(tmp_path):
    parser = argparse.ArgumentParser()
    for name, kwargs in (
        ("--flag", {"action": "store_true"}), ("--other", {"action": "store_true"}), ("--sure", {"action": argparse.BooleanOptionalAction}),
        ("--many", {"action": "append"}), ("--list", {}), ("--object", {}), ("--choice", {"choices": ["true", "false"]}), ("--config", {}),
    ):  # fmt: skip
        parser.add_argument(name, **kwargs)
    values = {"flag": True, "other": False, "sure": False, "many": ["a", "b"], "list": [1, 2], "object": {"a": True}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values | {"choice": True}))
    words = console.with_config(["do", "it", "--config", str(tmp_path / "x.yaml")], {("do", "it"): parser})
    found = vars(parser.parse_args(words[2:]))
    assert words[:2] == ["do", "it"] and found.pop("config")
    assert found == {
        "flag": True, "other": False, "sure": False, "many": ["a", "b"], "list": "1,2", "object": '{"a": true}', "choice": "true"
    }  # fmt: skip
    words = console.with_config(["do", "it", f"--config={tmp_path}/x.yaml", "--many", "c"], {("do", "it"): parser})
    assert parser.parse_args(words[2:]).many == ["c"]
    assert console.with_config(["do", "it"], {("do", "it"): parser}) == ["do", "it"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("max_token: 3\n", "`max_token`, which is no option"),
        ("- 1\n", "mapping"),
        ("a: [1\n", "not YAML"),
        (None, "no file"),
    ],
)
def test_a_yaml_file_of_another_command_is_wrong_usage_too(tmp_path, capsys, text, words):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    for command in (["eval"], ["bench", "decode"], ["regenerate"], ["card"]):
        code, _, err = printed([*command, "--config", str(file)], capsys)
        assert code == 2 and words in err.splitlines()[-1], (command, err)


def test_what_is_wrong_with_a_yaml_file_is_said(folder, tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("max_steps: [1\n")
    (tmp_path / "unknown.yaml").write_text(f"dataset_name: {folder}/rows.jsonl\nmax_step: 1\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    for name, code, word in (
        ("nowhere.yaml", 2, "nowhere.yaml"),
        ("broken.yaml", 2, "not YAML"),
        ("unknown.yaml", 1, "max_step"),
        ("list.yaml", 1, "mapping"),
    ):
        try:
            found = main(["train", "--output_dir", str(tmp_path / "x"), "--config", str(tmp_path / name)])
        except SystemExit as stop:
            found = stop.code
        assert found == code and word in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_split_that_is_missing_is_named_with_those_that_exist(folder, tmp_path, capsys):
    common = ["train", "--config", str(folder / "run.yaml"), "--output_dir", str(tmp_path)]
    assert main([*common, "--eval_strategy", "steps"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no split `test`, but train" in last and "--dataset_test_split" in last


def test_training_data_that_cannot_be_read_says_why(folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"\n')
    common = ["train", "--config", str(folder / "run.yaml"), "--output_dir", str(tmp_path / "out")]
    assert main([*common, "--dataset_name", str(rows)]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("gto-hf: error: ") and str(rows) in last and "JSON" in last


def test_a_parquet_file_is_training_data(folder, tmp_path, capsys):
    Dataset.from_json(str(folder / "rows.jsonl")).to_parquet(tmp_path / "rows.parquet")
    common = ["train", "--config", str(folder / "run.yaml"), "--output_dir", str(tmp_path / "out")]
    assert main([*common, "--dataset_name", str(tmp_path / "rows.parquet")]) == 0


@pytest.mark.slow
def test_accelerate_launches_the_command(folder, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "gto_hf"]
    train = ["train", "--config", str(folder / "run.yaml"), "--output_dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *train], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert gto_hf.AutoDraft.from_pretrained(tmp_path).config.draft_type == "eagle3"


def test_completion_knows_every_command_and_says_what_to_install(monkeypatch, capsys):
    made = {}

    def complete(parser, shell):
        commands = next(action.choices for action in parser._actions if action.dest == "command")
        made[shell] = {name: set(sub._option_string_actions) for name, sub in commands.items()}
        return "# a script\n"

    monkeypatch.setitem(sys.modules, "shtab", types.SimpleNamespace(complete=complete))
    assert printed(["--completion", "bash"], capsys)[:2] == (0, "# a script\n")
    assert "--gto_weight" in made["bash"]["train"] and "version" in made["bash"]
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = printed(["--completion", "zsh"], capsys)
    assert code == 2 and "pip install" in err and "[completion]" in err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of another kind")
def test_a_reader_that_has_seen_enough_is_no_error():
    run = subprocess.Popen(
        [sys.executable, "-m", "gto_hf", "version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run.stdout.close()
    assert run.stderr.read() == "" and run.wait() == 0
    run.stderr.close()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "gto-hf[draw]"'),
        ('{"url": "file:///clone", "dir_info": {"editable": true}}', 'pip install -e ".[draw]"'),
    ],
)
def test_a_missing_extra_is_named_as_the_package_was_installed(origin, command, monkeypatch):
    monkeypatch.setattr(extras, "distribution", lambda name: types.SimpleNamespace(read_text=lambda file: origin))
    assert command in extras.install_hint("draw")
