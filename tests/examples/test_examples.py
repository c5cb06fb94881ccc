# SPDX-License-Identifier: Apache-2.0
"""Every example runs, in small, on a tiny target in float32 and a draft that knows some of its texts."""

import importlib.util
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import gto_hf
from gto_hf import quickstart
from gto_hf.drafts import DRAFTS
from tests.tiny import memorised_rows, tiny_draft, tiny_target, tiny_tokenizer, train_tiny


FOLDER = Path(__file__).parents[2] / "examples"
LONGEST = 80  # lines
ABOUT = {"quickstart.py"}  # longer; run by .ci/run and by hand


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder with `target`, `draft`, `rows.jsonl` and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target()
    rows, _ = memorised_rows(target, count=12, length=40)
    draft = tiny_draft(target, vocab=60)
    train_tiny(draft, target, rows, steps=40)
    draft.tree = gto_hf.TreeConfig(depth=3, top_k=3, total_tokens=8)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("ABCDE", "FGHIJ", "KLMNO", "PQRST")]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture
def example(monkeypatch):
    """Loads an example by name; its target is in float32, so that texts can be compared token for token."""

    def load(name):
        monkeypatch.setattr(quickstart, "load_target", partial(quickstart.load_target, dtype=torch.float32))
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_comparison_runs_goes_on_and_refuses_another_ones_results(models, example, tmp_path, monkeypatch, capsys):
    module = example("research/comparison")
    monkeypatch.setattr(module, "load_target", partial(quickstart.load_target, models / "target", dtype=torch.float32))

    def run(*more, rows="rows.jsonl"):
        argv = ["comparison.py", "--smoke", "--output", str(tmp_path / "out"), "--train", str(models / rows)]
        argv += ["--questions", str(models / "chats.jsonl"), *more]
        monkeypatch.setattr("sys.argv", argv)
        module.main()
        return capsys.readouterr().out

    table = run("--variants", "control", "gto", "tree_kl")
    for name in ("phase1", "control", "gto", "tree_kl"):
        assert table.count(f"| {name} |") == 4  # two tables for each temperature
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/log.json")}
    assert {path.parent.name for path in logs} >= {"phase1", "control-seed1", "gto-seed1", "tree_kl-seed1"}
    again = run("--variants", "control", "gto", "tree_kl")
    assert again[again.index("| draft") :] == table[table.index("| draft") :]
    assert all(path.stat().st_mtime_ns == made for path, made in logs.items())
    monkeypatch.setitem(module.VARIANTS, "gto", {**module.VARIANTS["gto"], "gto_weight": 2.0})
    with pytest.raises(ValueError, match="gto_weight = 0.5, but now it is 2.0"):
        run("--variants", "gto")
    lines = (models / "rows.jsonl").read_text().splitlines()
    (models / "fewer.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match="Name another folder"):
        run("--variants", "control", rows="fewer.jsonl")
    out = tmp_path / "stranger" / "phase1"
    out.mkdir(parents=True)
    (out / "log.json").write_text("{}")
    with pytest.raises(ValueError, match="stranger.*None"):
        run("--output", str(tmp_path / "stranger"))


def test_the_comparison_starts_from_a_draft_as_it_is(models, example, tmp_path, monkeypatch, capsys):
    module = example("research/comparison")
    monkeypatch.setattr(module, "load_target", partial(quickstart.load_target, models / "target", dtype=torch.float32))
    trained = []
    monkeypatch.setattr(
        module, "GTOConfig", lambda *args, **options: trained.append(options) or gto_hf.GTOConfig(*args, **options)
    )
    argv = ["comparison.py", "--smoke", "--output", str(tmp_path / "out"), "--train", str(models / "rows.jsonl")]
    argv += ["--questions", str(models / "chats.jsonl"), "--start", str(models / "draft"), "--phase1-steps", "0"]
    monkeypatch.setattr("sys.argv", [*argv, "--ttt-steps", "2", "--variants", "control"])
    for _ in range(2):
        module.main()
        assert "| control |" in capsys.readouterr().out
    # Phase I is skipped, and what is there is not made again.
    assert [options["ttt_steps"] for options in trained] == [2]
    start, kept = (gto_hf.AutoDraft.from_pretrained(path) for path in (models / "draft", tmp_path / "out" / "phase1"))
    assert all(torch.equal(mine, kept.state_dict()[name].to(mine)) for name, mine in start.state_dict().items())


def test_examples_are_short_and_each_has_a_test():
    here = Path(__file__).read_text()
    for path in FOLDER.glob("*.py"):
        if path.name not in ABOUT:
            assert path.read_text().count("\n") <= LONGEST, path.name
            assert f'example("{path.stem}")' in here, path.name
    cells = json.loads((FOLDER / "decode.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(text.count("\n") + 1 for text in code) <= LONGEST


def test_training_on_chats_ends_with_a_draft_that_is_ready(models, example, tmp_path, capsys):
    options = ["--target", str(models / "target"), "--output", str(tmp_path), "--answers", "3"]
    options += ["--max-new-tokens", "24", "--draft-vocab", "64", "--epochs", "2", "--gto-steps", "2"]
    example("train_own_chats").main([str(models / "chats.jsonl"), *options])
    out = capsys.readouterr().out
    taus = re.findall(r"(phase\d): acceptance length on chats it has not seen: (\d\.\d\d)", out)
    assert [name for name, _ in taus] == ["phase1", "phase2"] and all(float(tau) >= 1 for _, tau in taus)
    assert "1 of 1 texts identical" in out and "ready to use" in out  # one chat of four, however many answers
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 12
    assert gto_hf.AutoDraft.from_pretrained(tmp_path / "phase2").config.draft_vocab_size == 64


def test_an_adapter_is_trained_named_and_merged(models, example, tmp_path, capsys):
    options = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--output", str(tmp_path)]
    rows = ["--rows", str(models / "rows.jsonl"), "--steps", "3", "--gto-weight", "0.5"]
    example("lora_domain").main([*options, *rows])
    out = capsys.readouterr().out
    assert re.search(r"held-out rows: \d\.\d\d before, \d\.\d\d after", out)
    made = json.loads(out[out.rindex('{"adapter"') :].splitlines()[0])
    assert 0 < made["bytes"] < (models / "draft" / "model.safetensors").stat().st_size
    merged, base = (gto_hf.AutoDraft.from_pretrained(path) for path in (made["plain draft"], models / "draft"))
    assert torch.equal(merged.d2t, base.d2t) and not torch.equal(merged.fc.weight, base.fc.weight)
    assert torch.equal(merged.lm_head.weight, base.lm_head.weight)


def test_ablations_print_one_row_per_variant_and_the_control_is_one(models, example, tmp_path, capsys):
    options = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--output", str(tmp_path)]
    options += ["--rows", str(models / "rows.jsonl"), "--steps", "2", "--seeds", "2", "--new-tokens", "12"]
    example("ablations").main([*options, "--variants", "control", "gto-m1", "gto"])
    rows = re.findall(r"^\| ([\w-]+) \| (\d\.\d+, \d\.\d+) \| (\d\.\d+) \| \d\.\d+ \|$", capsys.readouterr().out, re.M)
    assert [name for name, _, _ in rows] == ["control", "gto-m1", "gto"]
    assert rows[0][1:] == rows[1][1:]  # groups of one position train the token loss alone


def test_a_batch_answers_every_prompt_as_it_is_answered_alone(models, example, capsys):
    options = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--max-new-tokens", "12"]
    module, prompts = example("batch"), ["ABCDEF", "GHI"]
    module.main([*options, *prompts])
    together = capsys.readouterr().out
    for prompt in prompts:
        module.main([*options, prompt])
        alone = capsys.readouterr().out
        assert alone[: alone.rindex("\n\n")] in together
    assert "tokens of 2 rows in" in together


def test_a_chat_is_coloured_by_who_wrote_it(models, example, monkeypatch, capsys):
    module = example("chat")
    said = iter(["ABCDE", "FGH"])

    def asked(self, prompt):
        for text in said:
            return text
        raise EOFError  # Ctrl-D ends the chat

    monkeypatch.setattr(module.Console, "input", asked)
    shown = []
    monkeypatch.setattr(module.Live, "update", lambda self, renderable, refresh: shown.append(renderable))
    module.main(["--target", str(models / "target"), "--draft", str(models / "draft"), "--max-new-tokens", "20"])
    target, tokenizer = module.load_target(str(models / "target"))
    ids = tokenizer("ABCDE", return_tensors="pt").input_ids
    stock = target.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(stock, skip_special_tokens=True)
    (text, status), *_ = [group.renderables for group in shown if group.renderables[0].plain == expected][-1:]
    styles = [str(span.style) for span in text.spans]
    assert (
        set(styles) == {"green", "bold blue"} and "".join(text.plain[s.start : s.end] for s in text.spans) == expected
    )
    # Every target forward wrote one blue token, except where a stop cut the last round.
    forwards = int(re.search(r"(\d+) target forwards", status.plain)[1])
    assert styles.count("bold blue") in (forwards, forwards - 1)


def test_a_draft_type_of_ones_own_trains_loads_and_is_lossless(models, example, tmp_path, capsys):
    module = example("custom_draft")
    try:
        options = ["--rows", str(models / "rows.jsonl"), "--output", str(tmp_path), "--steps", "4"]
        module.main(["--target", str(models / "target"), *options])
    finally:
        del DRAFTS["mlp"]
    out = capsys.readouterr().out
    assert "MLPDraft\n3 of 3 texts identical to plain generate in torch.float32" in out
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert history["global_step"] == 4


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """A `vllm` and an `sglang` that write down how they were called and end with 7."""
    called = tmp_path / "called.json"
    script = f"import json, sys\nopen({str(called)!r}, 'w').write(json.dumps(sys.argv[1:]))\nsys.exit(7)\n"
    (tmp_path / "vllm").write_text(f"#!{sys.executable}\n{script}")
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(script)

    def install():
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        monkeypatch.syspath_prepend(tmp_path)
        return called

    return install


@pytest.mark.parametrize("engine, more", [("vllm", []), ("sglang", []), ("sglang", ["--tree"])])
def test_an_engines_command_is_shown_without_it_and_run_with_it(
    models, example, engines, tmp_path, capsys, engine, more
):
    output = tmp_path / "out"
    pair = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--output", str(output)]
    options, module = [*pair, "--engine", engine, "--tokens", "4", *more], example("serve")
    if not module.installed(engine):
        with pytest.raises(SystemExit) as stop:
            module.main([*options, "--run"])
        assert stop.value.code == 2 and f"pip install {engine}" in capsys.readouterr().err and not output.exists()
    module.main(options)
    command = shlex.split(capsys.readouterr().out.split("serve it:\n")[1].splitlines()[0])
    assert (output / "config.json").exists() and (output / "tokenizer.json").exists()
    if engine == "vllm":
        method = {"method": "eagle3", "model": str(output), "num_speculative_tokens": 4}
        assert command[:3] == ["vllm", "serve", str(models / "target")] and json.loads(command[-1]) == method
    else:
        steps, topk, tokens = (int(command[place]) for place in (-5, -3, -1))
        assert command[3:5] == ["--model-path", str(models / "target")] and command[8] == str(output)
        assert (steps, topk, tokens) == ((3, 3, 9) if more else (4, 1, 5))  # with the root
    called = engines()
    with pytest.raises(SystemExit) as stop:
        module.main([*options, "--overwrite", "--run"])
    assert stop.value.code == 7
    assert json.loads(called.read_text()) == command[1 if engine == "vllm" else 3 :]


def test_what_an_engine_cannot_do_is_refused(models, example, capsys):
    with pytest.raises(SystemExit) as stop:
        example("serve").main(["--target", str(models / "target"), "--draft", str(models / "draft"), "--tree"])
    assert stop.value.code == 2 and "--tree is for SGLang" in capsys.readouterr().err


def test_the_notebook_runs_from_top_to_bottom(models, capsys):
    cells = json.loads((FOLDER / "decode.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    (given,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", ())]
    given["source"] = [f"TARGET = {str(models / 'target')!r}\n", f"DRAFT = {str(models / 'draft')!r}\n"]
    space = {}
    for number, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
    out = capsys.readouterr().out
    assert "acceptance length" in out and "target 0." in out and "verdict: ready to use" in out
    assert space["counts"].target_forwards < space["counts"].emitted_tokens
