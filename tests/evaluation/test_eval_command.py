# SPDX-License-Identifier: Apache-2.0
"""`gto-hf eval` as a user runs it: baselines, a folder of results, a run that is killed, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from gto_hf import TreeConfig
from gto_hf.cli import main
from gto_hf.evaluation import Question, load_set, plots, session
from gto_hf.evaluation.plots import check_matplotlib
from gto_hf.evaluation.prompts import split_name, spread_each, with_system
from gto_hf.evaluation.systems import Baseline, load_dflash, parse_baselines
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer


def dflash(**fields):
    config = {"block_size": 3, "mask_token_id": 5, "target_layer_ids": [1, 3, 5], "sliding_window": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**config, **sizes, **ends, **fields}))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_draft(target, tree=TreeConfig(3, 3, 8)).save_pretrained(folder / "draft")
    tiny_target(seed=1).save_pretrained(folder / "small")
    dflash().save_pretrained(folder / "dflash")
    (folder / "one.jsonl").write_text('{"turns": ["ABCDEF", "GHI"]}\n')
    (folder / "two.jsonl").write_text('{"prompt": "QRS"}\n')
    return folder


def command(models, output, *more, tokens=6, temperature="0"):
    pair = ["--target", f"{models}/target", "--draft", f"d={models}/draft", "--dtype", "float32"]
    sets = ["--sets", f"{models}/one.jsonl,second={models}/two.jsonl", "--temperature", temperature]
    return ["eval", *pair, *sets, "--max-new-tokens", str(tokens), "--output", str(output), *more]


def rows(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_everything_in_one_run(models, tmp_path, capsys, monkeypatch):
    out, drawn = tmp_path / "results", []
    real = plots._by_tree
    monkeypatch.setattr(plots, "_by_tree", lambda *args, **kwargs: drawn.append(real(*args, **kwargs)) or drawn[-1])
    baselines = f"plain,prompt-lookup:3,assisted:{models}/small,dflash:{models}/dflash"
    assert (
        main(command(models, out, "--baseline", baselines, "--tree-sizes", "2x2x4,3x1x3", tokens=4, temperature="0,1"))
        == 0
    )
    printed = capsys.readouterr().out
    assert "one: 1 questions, hash " in printed and "second: 1 questions, hash " in printed
    names = [
        "plain generate", "prompt lookup 3", "stock assisted small", "DFlash dflash", "d", "d @ 2/2/4", "d @ 3/1/3"
    ]  # fmt: skip
    data = json.loads((out / "results.json").read_text())
    found = {(r["system"], r["temperature"], r["set"]): r for r in data["results"]}
    assert list(found) == [(n, t, s) for t in (0, 1) for n in names for s in ("all", "one", "second")]
    for (name, temperature, which), result in found.items():
        counts, figures = result["counts"], result["figures"]
        assert counts["answers"] == {"all": 3, "one": 2, "second": 1}[which]
        assert counts["tokens"] > counts["first_tokens"] >= counts["answers"] and figures["speedup"] > 0
        assert counts["seconds"] > counts["first_seconds"] > 0
        if temperature == 0 or name.startswith("d"):  # stock's baselines draw other samples
            assert result["identical_to_plain"] == counts["answers"]
        if name == "plain generate":
            assert figures["speedup"] == figures["speedup_after_prefill"] == 1 and counts["statistics"]["rounds"] == 0
            continue
        statistics = counts["statistics"]
        assert figures["tau_micro"] >= 1 and sum(statistics["accepted_histogram"]) == statistics["rounds"]
        if name.startswith("d"):
            assert counts["traced_rounds"] == statistics["rounds"] == sum(counts["greedy_histogram"])
            assert counts["observed_accepted"] == sum(i * n for i, n in enumerate(statistics["accepted_histogram"]))
            shares = [figures[f"{part}_share"] for part in ("target", "draft", "processor", "host")]
            assert sum(shares) == pytest.approx(1) and min(shares) > 0
    for name in ("d", "d @ 2/2/4"):  # sets add up
        whole, parts = found[name, 0, "all"]["counts"], [found[name, 0, s]["counts"] for s in ("one", "second")]
        assert whole["tokens"] == sum(part["tokens"] for part in parts)
    chain = found["d @ 3/1/3", 0, "all"]
    assert chain["figures"]["tau_chain_simulated"] == pytest.approx(chain["figures"]["tau_micro"], abs=0.3)
    text = (out / "results.md").read_text()
    assert "## Acceptance by depth" in text and "## Time of a round" in text and "- machine: " in text
    assert list(data["settings"]["weights"]) == ["d"] and data["settings"]["weights"]["d"] in text
    # The tree of `--tree-sizes` and the draft's own, for each temperature.
    assert [sorted(axis.lines[0].get_xdata()) for axis in drawn[0].axes] == [[3, 4, 8]] * 2
    for name in ("tau_by_set", "acceptance_by_depth", "time_split", "speedup_by_tree"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_after_any_cut_without_losing_or_doubling_a_row(models, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--no-plots", "--no-details"]
    assert main(command(models, whole, *options)) == 0
    text = (whole / "answers.jsonl").read_bytes()
    assert len(rows(whole)) == 6
    made = []
    monkeypatch.setattr(
        session, "measure_answer", lambda *a, _real=session.measure_answer, **k: made.append(1) or _real(*a, **k)
    )
    for size in (0, len(text) // 3, len(text) - 2, len(text)):
        cut.mkdir(exist_ok=True)
        (cut / "answers.meta").write_text((whole / "answers.meta").read_text())
        (cut / "answers.jsonl").write_bytes(text[:size])
        complete = text[:size].count(b"\n")
        made.clear()
        assert main(command(models, cut, *options)) == 0
        assert len(made) == (6 - complete + 2 if complete < 6 else 0)  # two calls warm up
        again = rows(cut)
        assert [(r["id"], r["answer"], r["tokens"]) for r in again] == [
            (r["id"], r["answer"], r["tokens"]) for r in rows(whole)
        ]


def test_a_killed_process_can_be_continued(models, tmp_path):
    out = tmp_path / "killed"
    args = command(models, out, "--no-plots", "--no-details", tokens=16)
    process = subprocess.Popen(
        [sys.executable, "-m", "gto_hf", *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    answers = out / "answers.jsonl"
    while process.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [json.loads(line) for line in answers.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert before
    assert main(args) == 0
    after = rows(out)
    assert after[: len(before)] == before and len(after) == 6
    assert len({(r["id"], r["answer"]) for r in after}) == 6


@pytest.mark.parametrize(
    "change, words",
    [
        (["--seed", "1"], "`seed` was 0 and is 1"),
        (["--tree-sizes", "2x2x4"], "`systems` was"),
        (["--temperature", "1"], "`temperatures` was [0.0]"),
    ],
)
def test_answers_of_other_settings_are_not_mixed(models, tmp_path, capsys, change, words):
    out = tmp_path / "results"
    options = ["--no-plots", "--no-details", "--questions", "1"]
    assert main(command(models, out, *options, tokens=2)) == 0
    assert main(command(models, out, *options, *change, tokens=2)) == 1
    error = capsys.readouterr().err
    assert words in error and "give another output" in error
    assert len(rows(out)) == 4


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("generation_config.json", {"repetition_penalty": 1.3}, "`generation config` was"),
        ("tokenizer_config.json", {"chat_template": "{{ messages[-1].content }}!"}, "`chat template` was"),
    ],
)
def test_files_beside_the_weights_are_settings_too(models, tmp_path, capsys, name, change, words):
    target, out = tmp_path / "target", tmp_path / "results"
    shutil.copytree(models / "target", target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    options = ["--no-plots", "--no-details", "--questions", "1", "--target", str(target)]
    assert main(command(models, out, *options, tokens=2)) == 0
    file = target / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(command(models, out, *options, tokens=2)) == 1
    assert words in capsys.readouterr().err


def test_answers_of_one_token_have_no_speed_after_the_prefill(models, tmp_path, capsys):
    out = tmp_path / "results"
    assert main(command(models, out, "--baseline", "prompt-lookup:3", tokens=1)) == 0
    for result in json.loads((out / "results.json").read_text())["results"]:
        assert result["figures"]["speedup"] > 0 and result["figures"]["speedup_after_prefill"] is None
        assert result["figures"]["tau_macro"] is None
    assert "nan" not in (out / "results.md").read_text() and "nan" not in capsys.readouterr().out


def test_a_path_may_hold_an_equals_sign(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("lr=1")
    shutil.copytree(models / "draft", folder / "draft")
    shutil.copy(models / "one.jsonl", folder / "q.jsonl")
    assert split_name("lr=1/draft") == ("", "lr=1/draft")
    assert split_name("mine=lr=1/draft") == ("mine", "lr=1/draft")
    assert split_name("a=b=lr=1/draft") == ("a=b", "lr=1/draft")
    assert split_name("name=org/draft") == ("name", "org/draft") and split_name("org/draft") == ("", "org/draft")
    assert load_set("lr=1/q.jsonl").name == "q" and load_set("gsm8k=lr=1/q.jsonl").name == "gsm8k"
    options = ["eval", "--target", f"{models}/target", "--dtype", "float32", "--max-new-tokens", "2"]
    assert main([*options, "--draft", "lr=1/draft", "--sets", "lr=1/q.jsonl"]) == 0


def test_a_folder_does_not_hide_a_set_of_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").mkdir()
    monkeypatch.setattr("gto_hf.evaluation.prompts.public_rows", lambda name: ([{"turns": ["a"]}], "the Hub"))
    assert load_set("gsm8k").source == "the Hub"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--baseline", "medusa"], "`--baseline medusa` is none of: plain, prompt-lookup"),
        (["--baseline", "assisted:"], "`--baseline assisted:` is none of"),
        (["--baseline", "prompt-lookup:x"], "none of"),
        (["--baseline", "prompt-lookup,prompt-lookup"], "twice"),
        (["--tree-sizes", "4-6"], "depth x top-k x nodes"),
        (["--tree-sizes", "2x2x4,2x2x4"], "twice"),
        (["--temperature", "0,x"], "give numbers"),
        (["--temperature", "-1"], "0 or more"),
        (["--temperature", "0,nan"], "0 or more"),
        (["--sets", "mt-bench=/nowhere.jsonl"], "no file `/nowhere.jsonl`"),
        (["--sets", "chat,code,chat"], "names `chat` twice"),
        (["--sets", "own,chat"], "every question of `chat` stands in an earlier set"),
        (["--draft", "d=/nowhere"], "`--draft` names `d` twice"),
        (["--draft", "plain generate={models}/draft"], "Two systems are called plain generate"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(models, tmp_path, capsys, options, words):
    options = [option.format(models=models) for option in options]
    assert main(command(models, tmp_path / "results", *options)) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["file", "file/below", "folder.json"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    options = ["--target", "./nowhere", "--draft", "./nowhere", "--output", str(tmp_path / name)]
    assert main(["eval", *options]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / name}`" in error and ("is a file" in error or "a folder has that name" in error)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_question_of_two_sets_is_answered_once(models, tmp_path, capsys):
    (tmp_path / "more.jsonl").write_text('{"prompt": "QRS"}\n{"prompt": "TUV"}\n')
    out = tmp_path / "results"
    sets = ["--sets", f"{models}/two.jsonl,{tmp_path}/more.jsonl", "--no-plots", "--no-details"]
    assert main(command(models, out, *sets, tokens=2)) == 0
    said = capsys.readouterr().out
    assert "more: 1 questions" in said and "without 1 that an earlier set has" in said
    assert [row["set"] for row in rows(out) if row["id"].endswith("plain generate")] == ["two", "more"]


def test_other_samples_of_stock_baselines_are_no_difference(models, tmp_path, capsys):
    options = ["--baseline", f"assisted:{models}/small", "--require-identical", "--no-plots", "--no-details"]
    assert main(command(models, tmp_path / "results", *options, tokens=12, temperature="1")) == 0
    assert "3 of 3 answers with a draft are identical" in capsys.readouterr().out
    data = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [r["identical_to_plain"] for r in data["results"] if r["set"] == "all"][1] < 3  # of the baseline


def test_settings_say_what_a_figure_must_be_read_with(models, tmp_path):
    target, out = tmp_path / "target", tmp_path / "results"
    shutil.copytree(models / "target", target)
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.3, "min_p": 0.9, "top_k": 3}))
    options = ["--baseline", f"assisted:{models}/small", "--no-plots", "--no-details", "--target", str(target)]
    assert main(command(models, out, *options, tokens=2)) == 0
    found = json.loads((out / "results.json").read_text())["settings"]
    assert found["generation config"] == {
        "repetition_penalty": 1.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0
    }  # fmt: skip
    assert found["attention"] == "sdpa" and found["baselines"] == ["plain", f"assisted:{models}/small"]
    assert found["drafts"] == {"d": {"path": f"{models}/draft", "revision": None}}
    assert found["gto-hf"] == version("gto-hf") and found["machine"] and found["threads"] == torch.get_num_threads()
    assert abs(date.fromisoformat(found["date"]) - datetime.now(UTC).date()) <= timedelta(days=1)
    assert "target revision" in found and found["target"] == str(target)


def test_a_run_goes_on_another_day_with_the_same_weights_elsewhere(models, tmp_path, monkeypatch):
    out = tmp_path / "results"
    options = ["--no-plots", "--no-details"]
    assert main(command(models, out, *options, tokens=2)) == 0
    shutil.copytree(models / "draft", tmp_path / "draft")
    monkeypatch.setattr(session, "measure_answer", None)  # nothing is answered again
    moved = command(models, out, *options, tokens=2)
    moved[moved.index(f"d={models}/draft")] = f"d={tmp_path}/draft"
    meta = json.loads((out / "answers.meta").read_text())
    assert "date" not in meta["settings"] and "drafts" not in meta["settings"]
    assert main(moved) == 0


@pytest.fixture
def templated(models, tmp_path):
    """The target with a chat template that reads a variable, and the text before every prompt of one question."""
    target = tmp_path / "target"
    shutil.copytree(models / "target", target)
    template = (
        "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}{% endfor %}{{ 'T' if thinking else 'N' }}"
    )
    (target / "chat_template.jinja").write_text(template)
    return target


def test_a_system_prompt_and_template_variables_make_the_prompts(models, templated, tmp_path, monkeypatch, capsys):
    (tmp_path / "system.txt").write_text("BE\n")
    asked = []
    real = session.measure_answer
    monkeypatch.setattr(
        session, "measure_answer", lambda t, prompt, *a, **k: asked.append(prompt) or real(t, prompt, *a, **k)
    )
    options = ["--no-plots", "--no-details", "--questions-per-set", "1", "--target", str(templated)]
    mine = ["--system", str(tmp_path / "system.txt"), "--chat-template-kwargs", '{"thinking": true}']
    assert main(command(models, tmp_path / "a", *options, *mine, tokens=2)) == 0
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(asked[0]) == "SBEUABCDEFT" and tokenizer.decode(asked[-1]) == "SBEUQRST"
    found = json.loads((tmp_path / "a" / "results.json").read_text())["settings"]
    assert (found["system prompt"], found["chat template kwargs"]) == ("BE", {"thinking": True})
    capsys.readouterr()
    for other, words in ((mine[:2], "`chat template kwargs` was"), (mine[2:], "`prompts hash` was")):
        assert main(command(models, tmp_path / "a", *options, *other, tokens=2)) == 1
        assert words in capsys.readouterr().err


def test_a_tokenizer_without_a_template_is_said(models, tmp_path, capsys):
    options = ["--no-plots", "--no-details", "--questions", "1"]
    with pytest.warns(UserWarning, match="no chat template: prompts are plain text"):
        assert main(command(models, tmp_path / "a", *options, tokens=2)) == 0
    assert (
        main(command(models, tmp_path / "b", *options, "--chat-template-kwargs", '{"thinking": true}', tokens=2)) == 1
    )
    assert "has no chat template" in capsys.readouterr().err and not (tmp_path / "b").exists()
    for wrong, words in ((["--chat-template-kwargs", "[1]"], "JSON object"), (["--system", " "], "is empty")):
        assert main(command(models, tmp_path / "b", *options, *wrong, tokens=2)) == 1
        assert words in capsys.readouterr().err


def test_questions_of_each_set():
    many = [
        Question(str(n), name, (f"{name}{n}",))
        for name, count in (("a", 10), ("b", 3), ("c", 1))
        for n in range(count)
    ]
    assert [q.id for q in spread_each(many, 2)] == ["0", "5", "0", "1", "0"]
    told = with_system([many[0], Question("x", "s", ("t",), (("system", "own"),))], "be good")
    assert told[0].messages(0, []) == [{"role": "system", "content": "be good"}, {"role": "user", "content": "a0"}]
    assert told[1].messages(0, [])[0]["content"] == "own"


def test_baselines_are_read_in_order():
    assert parse_baselines("") == parse_baselines("plain") == [Baseline("plain")]
    found = parse_baselines("assisted:org/small, plain, prompt-lookup")
    assert found == [Baseline("plain"), Baseline("assisted", "org/small"), Baseline("prompt-lookup")]
    assert [b.name for b in found] == ["plain generate", "stock assisted small", "prompt lookup"]


def test_what_is_missing_from_a_dflash_draft_is_named(models, tmp_path):
    target = tiny_target()
    dflash(hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="made for a target of width 64.*width 32 and 8 layers"):
        load_dflash(str(tmp_path / "wide"), target)
    with pytest.raises(ValueError, match="block_size, mask_token_id, target_layer_ids are missing.*`llama`"):
        load_dflash(str(models / "small"), target)
    config = json.loads((models / "small" / "config.json").read_text())
    (tmp_path / "nested").mkdir()
    config["dflash_config"] = {"mask_token_id": 5, "target_layer_ids": [1]}
    (tmp_path / "nested" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mask_token_id, target_layer_ids stand in `dflash_config`"):
        load_dflash(str(tmp_path / "nested"), target)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "dflash_of_tomorrow"}')
    with pytest.raises(ValueError, match="has no class for this checkpoint.*muse_glimmer_assistant"):
        load_dflash(str(tmp_path / "unknown"), target)


def test_plots_without_matplotlib_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"\[draw\].*--no-plots"):
        check_matplotlib()
