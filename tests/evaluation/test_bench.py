# SPDX-License-Identifier: Apache-2.0
"""The benchmark's bookkeeping, and the commands end to end on a tiny pair."""

import json
import math

import pytest
import torch

from gto_hf import TreeConfig
from gto_hf.cli import main
from gto_hf.decoding import DecodingStatistics, RoundTimes
from gto_hf.evaluation.bench import (
    AUTO,
    PLAIN,
    Answer,
    SystemResult,
    bench_decode,
    bench_table,
    default_systems,
    limits_line,
    paired_ratio,
    peak_memory,
    sets_table,
)
from tests.families import FAMILIES, prompt
from tests.tiny import tiny_draft, tiny_tokenizer


def result(name, seconds, tokens=10, times=()):
    statistics = DecodingStatistics(emitted_tokens=tokens, rounds=4, accepted_histogram=[1, 3], bonus_tokens=4)
    return SystemResult(name, 0.0, [Answer([1] * tokens, s, statistics, list(times)) for s in seconds])


def test_the_paired_ratio_by_hand():
    ratio = paired_ratio(result("fast", [1.0, 2.0]), result(PLAIN, [2.0, 8.0]))
    assert ratio.mean == pytest.approx(math.sqrt(2 * 4))
    half = 1.96 * (math.log(4) - math.log(2)) / math.sqrt(2) / math.sqrt(2)
    assert ratio.high / ratio.mean == pytest.approx(math.exp(half)) and ratio.low * ratio.high == pytest.approx(
        ratio.mean**2
    )


def test_sets_are_told_apart():
    fast, plain = result("fast", [1.0, 2.0, 1.0]), result(PLAIN, [2.0, 8.0, 3.0])
    table = sets_table([plain, fast], ["chat", "code", "chat"])
    assert "| chat: SR, τ | code: SR, τ |" in table
    assert f"| fast | {math.sqrt(6):.2f}, 1.75 | 4.00, 1.75 |" in table


def test_times_are_medians():
    times = [RoundTimes(total=t) for t in (0.01, 0.02, 0.5)]
    assert result("draft", [1.0], times=times).milliseconds("total") == pytest.approx(20)


def test_the_line_on_limits_names_the_largest_cost():
    plain = result(PLAIN, [1.0])  # 100 ms a token
    times = [RoundTimes(target=0.12, draft=0.1, processors=0.0, total=0.23)]
    line = limits_line(result("draft", [0.5], times=times), plain)
    assert "2.30 plain tokens" in line and "the draft (100.0 ms)" in line and "slower than plain" in line
    times = [RoundTimes(target=0.15, draft=0.01, processors=0.0, total=0.165)]
    assert "the larger target forward (50.0 ms)" in limits_line(result("draft", [0.5], times=times), plain)
    assert "ended within the prefill" in limits_line(result("draft", [0.5]), plain)


def test_every_system_answers_every_prompt_with_the_same_text_and_the_draft_keeps_its_tree():
    model = FAMILIES["llama"].build()
    model.generation_config.pad_token_id = 0
    draft = tiny_draft(model, vocab=60)
    tree = draft.tree
    systems = default_systems(draft, [TreeConfig(3, 3, 8), TreeConfig(4, 4, 16)], early_exit=4)
    prompts = [row.tolist() for row in prompt(3, 9)]
    results = bench_decode(model, draft, systems, prompts, new_tokens=12)
    assert [r.name for r in results] == [s.name for s in systems] and draft.tree == tree
    assert {r.name for r in results} >= {PLAIN, AUTO, "prompt lookup", "stock early exit at 4", "draft, chain of 4"}
    for r in results:
        assert [a.tokens for a in r.answers] == [a.tokens for a in results[0].answers], r.name
        assert r.peak_memory > 0 and r.tokens_per_second > 0
    assert bench_table(results).count("\n") == len(results) + 1


def test_peak_memory_of_a_known_allocation():
    def allocate():
        big = torch.empty(1 << 20, dtype=torch.uint8)
        del big
        return torch.empty(1 << 18, dtype=torch.uint8)

    assert 1 << 20 <= peak_memory(allocate, torch.device("cpu")) < (1 << 20) + (1 << 17)


@pytest.fixture
def folders(tmp_path):
    model = FAMILIES["llama"].build()
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_draft(model, vocab=60, tree=TreeConfig(3, 3, 8)).save_pretrained(tmp_path / "draft")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "ABCDEF"}\n{"prompt": "HELLO"}\n')
    return tmp_path


def arguments(folders, *more):
    pair = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--dtype", "float32"]
    return [*pair, "--sets", str(folders / "questions.jsonl"), *more]


def test_the_bench_command_writes_what_it_measured(folders, capsys):
    out = folders / "bench.json"
    code = main(
        ["bench", "decode", *arguments(folders, "--questions", "2", "--trees", "2x3x6,3x3x8", "--max-new-tokens", "8")]
        + ["--output", str(out)]
    )
    printed = capsys.readouterr().out
    assert code == 0 and AUTO in printed and "over the best fixed one" in printed and "plain tokens" in printed
    data = json.loads(out.read_text())
    assert {"torch", "transformers", "threads", "dtype", "prompts hash"} <= set(data["settings"])
    assert len(data["systems"]) == 6 and all(len(s["answers"]) == 2 for s in data["systems"])
    assert main(["bench", "decode", *arguments(folders, "--trees", "4-6")]) == 1
    assert "depth x top-k x nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, options, words",
    [
        ("bench decode", ["--trees", "3x3x8,3x3x8"], "twice"),
        ("bench decode", ["--trees", ""], "names no tree"),
        ("bench decode", ["--temperature", "nan"], "0 or more"),
        ("bench decode", ["--max-new-tokens", "1"], "2 or more"),
        ("bench decode", ["--output", "/nowhere/at/all.json"], "no folder"),
        ("bench decode", ["--device", "foo"], "--device foo"),
        ("check", ["--sets", ","], "names no question set"),
        ("draw", ["--file", "tree.gif"], "must end in"),
        ("draw", ["--file", "/nowhere/at/all.svg"], "no folder"),
    ],
)
def test_bad_options_are_one_line_before_any_work(folders, capsys, command, options, words):
    assert main([*command.split(), *arguments(folders, *options)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gto-hf: error:") and words in error


@pytest.mark.parametrize("option", ["--questions", "--max-new-tokens", "--early-exit"])
def test_counts_are_positive(folders, capsys, option):
    with pytest.raises(SystemExit):
        main(["bench", "decode", *arguments(folders, option, "0")])
    assert "not a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize("row", ['{"turns": [1, 2]}', '{"messages": [{"content": "x"}]}'])
def test_rows_that_are_no_questions_are_named(folders, capsys, row):
    (folders / "questions.jsonl").write_text(row + "\n")
    assert main(["check", *arguments(folders)]) == 1
    assert "Row 0" in capsys.readouterr().err


def test_the_check_and_draw_commands(folders, capsys):
    assert main(["check", *arguments(folders, "--full", "--questions", "2")]) == 0
    assert "2 of 2 texts identical" in capsys.readouterr().out
    pytest.importorskip("rich")
    picture = folders / "tree.svg"
    assert main(["draw", *arguments(folders, "--max-new-tokens", "12", "--file", str(picture))]) == 0
    printed = capsys.readouterr().out
    assert "known tokens" in printed and "accepted, tree" in printed and picture.stat().st_size > 1000
    assert main(["draw", *arguments(folders, "--round", "99")]) == 1
