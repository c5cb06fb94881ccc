# SPDX-License-Identifier: Apache-2.0
"""Answers of a target in this process: what the rows hold, interruptions, refusals, and training on the file."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from datasets import load_dataset

from gto_hf import AutoDraft
from gto_hf.cli import main
from gto_hf.data import load_jsonl, regenerate, training_rows
from gto_hf.data.answer_file import AnswerFile
from gto_hf.trainer import script as train_script
from tests.tiny import EOS, tiny_target, tiny_tokenizer


# As ChatML: every message ends with the end token, so that a later prompt continues what was generated.
CHAT = (
    "{% for m in messages %}<s>{{ m['role'][0] | upper }}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>A{% endif %}"
)
# As templates of thinking models: history shows of an answer only what follows the last `=`, a new answer begins with `(`.
THINKING = CHAT.replace("m['content']", "m['content'].split('=')[-1]").replace("<s>A{% endif", "<s>A({% endif")
# Likely to end soon, and never another special token.
SOON = {"do_sample": True, "suppress_tokens": [0, 1], "sequence_bias": [[[EOS], 1.0]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny target and prompts of every kind."""
    path = tmp_path_factory.mktemp("regenerate")
    tiny_target().save_pretrained(path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path / "target")
    rows = [{"id": f"q{i}", "prompt": "ABCDEFGHIJKLMNOP"[: 1 + 7 * i % 13], "source": f"s{i % 2}"} for i in range(9)]
    rows += [{"turns": ["WHO", "WHY", "HOW"][: 1 + i % 3], "language": "X"} for i in range(6)]
    rows.append({"messages": [{"role": "system", "content": "SYS"}, {"role": "user", "content": "A"}]})
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    return path


def command(folder, output, *options):
    return [
        "regenerate", "--target", f"{folder}/target", "--prompts", f"{folder}/prompts.jsonl", "--output", str(output),
        "--dtype", "float32", "--device", "cpu", "--batch-size", "3", "--max-new-tokens", "24", *options,
    ]  # fmt: skip


SOON_JSON = ("--generation-config", json.dumps(SOON), "--answers", "2")


@pytest.fixture(scope="module")
def whole(folder):
    """The file of an uninterrupted run."""
    assert main(command(folder, folder / "whole.jsonl", *SOON_JSON)) == 0
    return (folder / "whole.jsonl").read_bytes()


def spans(row):
    """`(prompt, answer)` token lists of every labelled stretch of a row."""
    ids, labels = row["input_ids"], row["labels"]
    assert len(ids) == len(labels) and all(b in (-100, a) for a, b in zip(ids, labels, strict=True))
    starts = [i for i in range(1, len(ids)) if labels[i] != -100 and (labels[i - 1] == -100)]
    for start in starts:
        end = next((i for i in range(start, len(ids)) if labels[i] == -100), len(ids))
        yield ids[:start], ids[start:end]


def test_every_label_is_what_the_target_generated_after_what_it_read(folder, whole):
    rows = [json.loads(line) for line in whole.splitlines()]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    assert {(row["id"], row["answer"]) for row in rows if row["last"]} == {
        (key, answer) for key in {row["id"] for row in rows} for answer in range(2)
    }
    assert sum(row["last"] for row in rows) == 16 * 2
    joined = 0
    for row in rows:
        pairs = list(spans(row))
        joined += len(pairs) > 1
        assert row["finished"] == (pairs[-1][1][-1] == EOS)
        assert sum(m["role"] == "assistant" for m in row["messages"]) == row["turn"] + 1
        places = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"][-len(pairs) :]
        for (prompt, new), place in zip(pairs, places, strict=True):
            read = tokenizer.apply_chat_template(row["messages"][:place], tokenize=False, add_generation_prompt=True)
            assert prompt == tokenizer(read, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(new, skip_special_tokens=True) == row["messages"][place]["content"]
            assert EOS not in new[:-1] and 0 < len(new) <= 24
        assert all(new[-1] == EOS for _, new in pairs[:-1])  # no turn follows an answer that was cut
    assert joined > 0  # several turns in one row
    cut = [row for row in rows if not row["finished"]]
    assert cut and all(row["last"] for row in cut)
    firsts = [{row["id"]: row["input_ids"] for row in rows if row["answer"] == answer} for answer in range(2)]
    assert sum(firsts[0][key] != ids for key, ids in firsts[1].items()) > 12  # every answer is a draw of its own
    systems = [row for row in rows if row["messages"][0]["role"] == "system"]
    assert len(systems) == 2
    assert all(row["source"] in ("s0", "s1") for row in rows if row["id"].startswith("q"))
    assert {row.get("language") for row in rows} == {"X", None}


def test_greedy_batches_are_what_generate_writes_for_one_prompt(folder, tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    tokenizer.chat_template = CHAT
    prompts = load_jsonl_of(folder)[:9]
    rows = regenerate(
        target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=16, batch_size=4, do_sample=False
    )
    assert len(rows) == 9
    for row in rows:
        ((prompt, new),) = spans(row)
        ids = torch.tensor([prompt])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert alone[0].tolist() == prompt + new


def load_jsonl_of(folder):
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:-1]
    return [json.loads(line) for line in lines]


def test_batches_hold_prompts_of_like_length(folder, whole):
    firsts = [json.loads(line) for line in whole.splitlines()]
    lengths = [len(next(spans(row))[0]) for row in firsts if row["id"].startswith("q") and row["answer"] == 0]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 3


# ---------------------------------------------------------------- interruptions
def test_a_run_killed_in_the_middle_continues_to_the_same_file(folder, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    options = command(folder, output, *SOON_JSON)
    for _ in range(2):  # killed twice, the second time while it continues
        before = output.stat().st_size if output.exists() else 0
        child = subprocess.Popen([sys.executable, "-m", "gto_hf", *options], stdout=subprocess.DEVNULL)
        while child.poll() is None and (not output.exists() or output.stat().st_size <= before):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert before < output.stat().st_size < len(whole)
    assert main(options) == 0
    assert output.read_bytes() == whole
    assert main(options) == 0  # nothing left to do
    assert output.read_bytes() == whole


def test_a_file_cut_at_any_byte_continues_to_the_same_file(folder, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    (tmp_path / "out.meta").write_bytes((folder / "whole.meta").read_bytes())
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in (1, ends[3] - 1, ends[6], len(whole) // 2, ends[-2] + 40, len(whole) - 1):
        output.write_bytes(whole[:cut])
        assert main(command(folder, output, *SOON_JSON)) == 0
        assert output.read_bytes() == whole


def test_answers_may_be_added_later(folder, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    assert main(command(folder, output, *SOON_JSON[:2])) == 0
    assert output.read_bytes() == whole[: output.stat().st_size] and output.stat().st_size < len(whole)
    assert main(command(folder, output, *SOON_JSON)) == 0
    assert output.read_bytes() == whole


def test_the_seed_matters(folder, whole, tmp_path):
    assert main(command(folder, tmp_path / "out.jsonl", *SOON_JSON, "--seed", "1")) == 0
    assert (tmp_path / "out.jsonl").read_bytes() != whole


@pytest.mark.parametrize(
    "options, words",
    [
        (("--seed", "3"), "`seed` was 0 and is 3"),
        (("--batch-size", "4"), "`batch_size` was 3 and is 4"),
        (("--dtype", "bfloat16"), '`dtype` was "float32" and is "bfloat16"'),
        (("--limit", "5"), "`prompts` was 16 and is 5; `prompts_hash` was"),
        (("--max-new-tokens", "25"), "`generation.max_new_tokens` was 24 and is 25"),
        (("--answers", "1"), "`answers` was 2 and is 1"),
        (("--chat-template-kwargs", '{"a": 1}'), '`chat_template_kwargs` was null and is {"a": 1}'),
    ],
)
def test_other_settings_on_a_file_are_refused_by_name(folder, whole, tmp_path, capsys, options, words):
    output = tmp_path / "out.jsonl"
    output.write_bytes(whole)
    (tmp_path / "out.meta").write_bytes((folder / "whole.meta").read_bytes())
    assert main(command(folder, output, *SOON_JSON, *options)) == 1
    assert words in capsys.readouterr().err
    assert output.read_bytes() == whole
    assert (tmp_path / "out.meta").read_bytes() == (folder / "whole.meta").read_bytes()


def test_foreign_edited_and_busy_files_are_left_alone(folder, whole, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_bytes(b'{"prompt": "mine"}\n')
    assert main(command(folder, output, *SOON_JSON)) == 1
    assert "out.meta" in capsys.readouterr().err
    (tmp_path / "out.meta").write_bytes((folder / "whole.meta").read_bytes())
    assert main(command(folder, output, *SOON_JSON)) == 1
    assert "line 1, is no row of this command" in capsys.readouterr().err
    assert output.read_bytes() == b'{"prompt": "mine"}\n'
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join([*lines[2:], *lines[:2]]))
    assert main(command(folder, output, *SOON_JSON)) == 1
    assert "has been edited" in capsys.readouterr().err
    settings = json.loads((folder / "whole.meta").read_text())["settings"]
    output.write_bytes(whole)
    with AnswerFile(output, settings) as file:
        assert len(file.done) == 32
        assert main(command(folder, output, *SOON_JSON)) == 1
    assert "Another run is writing" in capsys.readouterr().err
    assert main(command(folder, output, *SOON_JSON)) == 0


# ---------------------------------------------------------------- templates and ends
def test_turns_of_a_thinking_template_get_rows_of_their_own(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    tokenizer.chat_template = THINKING
    prompts = [{"id": str(i), "turns": ["WHO", "WHY"]} for i in range(12)]
    options = {**SOON, "sequence_bias": [[[EOS], 2.0], [[tokenizer.convert_tokens_to_ids("=")], 4.0]]}
    rows = regenerate(target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=40, batch_size=12, **options)
    apart = 0
    for before, after in zip(rows, rows[1:], strict=False):
        if before["id"] != after["id"]:
            continue
        apart += 1
        ((_, thought),), ((prompt, _),) = spans(before), spans(after)
        said = tokenizer.decode(thought, skip_special_tokens=True)
        assert after["messages"][1]["content"] == said == before["messages"][-1]["content"]
        read = f"<s>UWHO</s><s>A{said.split('=')[-1]}</s><s>UWHY</s><s>A("
        assert prompt == tokenizer(read, add_special_tokens=False)["input_ids"]
        assert not before["last"] and after["last"] and (before["turn"], after["turn"]) == (0, 1)
    assert apart > 3


def test_later_turns_see_what_the_tokenizers_response_template_makes_of_an_answer(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    tokenizer.chat_template = CHAT.replace("<s>A{% endif", "<s>A({% endif")
    tokenizer.response_template = {
        "start_anchor": "<s>A",
        "fields": {"thinking": {"open": "(", "close": "="}, "content": {"close": "</s>"}},
    }
    prompts = [{"id": str(i), "turns": ["WHO", "WHY"]} for i in range(12)]
    options = {**SOON, "sequence_bias": [[[EOS], 2.0], [[tokenizer.convert_tokens_to_ids("=")], 4.0]]}
    rows = regenerate(target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=40, batch_size=12, **options)
    thoughts = 0
    for row in rows:
        for message in row["messages"]:
            if "thinking" in message:
                thoughts += 1
                assert "=" not in message["thinking"] and "</s>" not in message["content"]
        ((prompt, new), *_) = spans(row)
        written = tokenizer.decode(new)
        if row["finished"] and row["turn"] == 0 and "=" in written:
            thought, _, content = written.removesuffix("</s>").partition("=")
            assert row["messages"][-1].get("thinking", "") == thought
            assert row["messages"][-1]["content"] == content
    assert thoughts > 5


def test_a_target_with_several_end_tokens_ends_with_the_one_it_wrote(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    other = tokenizer.convert_tokens_to_ids("Z")
    target.generation_config.eos_token_id = [EOS, other]
    prompts = [{"id": str(i), "prompt": "ABC"} for i in range(16)]
    bias = [[[EOS], 2.0], [[other], 2.0]]
    rows = regenerate(
        target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=30, do_sample=True, sequence_bias=bias
    )
    ends = [row["input_ids"][-1] for row in rows if row["finished"]]
    assert set(ends) == {EOS, other}
    assert all(not {EOS, other} & set(new[:-1]) for row in rows for _, new in spans(row))


def test_stop_strings_end_answers_without_padding(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    target.generation_config.eos_token_id = target.config.eos_token_id = tokenizer.pad_token_id = 2
    prompts = [{"id": str(i), "prompt": "ABC"} for i in range(12)]
    rows = regenerate(
        target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=40, do_sample=True, stop_strings=["X", "Y"],
        suppress_tokens=[0, 1],
    )  # fmt: skip
    texts = [row["messages"][-1]["content"] for row in rows if row["finished"]]
    assert sum(text.endswith(("X", "Y")) for text in texts) > 3
    ends = {EOS, *tokenizer.convert_tokens_to_ids(["X", "Y"])}
    for row in rows:
        ((_, new),) = spans(row)
        assert not {0, *ends} & set(new[:-1]) and row["finished"] == (new[-1] in ends)


def test_prompts_without_room_are_skipped_and_counted(folder, tmp_path, capsys):
    lines = [{"prompt": "A" * length} for length in (4, 600, 500)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = command(folder, tmp_path / "out.jsonl")
    options[options.index("--prompts") + 1] = str(tmp_path / "p.jsonl")
    assert main(options) == 0
    assert "skipped 2: no room for max_new_tokens=24 within the target's 512" in capsys.readouterr().out
    assert len(load_jsonl(tmp_path / "out.jsonl")) == 1
    # a later turn for which there is no room ends the conversation
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": ["A", "B" * 500, "C"]}))
    options = command(folder, tmp_path / "b.jsonl", *SOON_JSON[:2], "--max-new-tokens", "40", "--seed", "1")
    options[options.index("--prompts") + 1] = str(tmp_path / "p.jsonl")
    assert main(options) == 0
    (row,) = load_jsonl(tmp_path / "b.jsonl")
    assert row["finished"] and row["last"] and row["turn"] == 0
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "A" * 600}))
    options = command(folder, tmp_path / "c.jsonl")
    options[options.index("--prompts") + 1] = str(tmp_path / "p.jsonl")
    assert main(options) == 1
    assert "None of the 1 prompts can be answered" in capsys.readouterr().err


# ---------------------------------------------------------------- training on the file
def test_the_file_is_trained_on_as_it_is(folder, whole, tmp_path):
    # by folder, so that the settings beside the rows are seen to be no data
    data = tmp_path / "data"
    data.mkdir()
    (data / "out.jsonl").write_bytes(whole)
    (data / "out.meta").write_bytes((folder / "whole.meta").read_bytes())
    for i, name in enumerate((data / "out.jsonl", data)):
        output = tmp_path / f"draft{i}"
        train_script.main(
            [
                "--target_model_name_or_path", f"{folder}/target", "--dataset_name", str(name), "--output_dir",
                str(output), "--max_steps", "1", "--bf16", "False", "--report_to", "none", "--tree_depth", "2",
                "--tree_top_k", "3", "--tree_total_tokens", "6", "--group_size", "3", "--disable_tqdm", "True",
                "--per_device_train_batch_size", "4", "--logging_steps", "1",
            ]
        )  # fmt: skip
        # every token of this tokenizer is a byte, so a fresh draft keeps all of them
        assert AutoDraft.from_pretrained(output).config.draft_vocab_size == 64
    loaded = load_dataset("json", data_files=str(data / "out.jsonl"), split="train")
    assert {"id", "messages", "input_ids", "labels", "source", "language"} <= set(loaded.column_names)


def test_rows_and_shipped_answers_are_both_read(folder, tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    prompts = [{"id": 1, "prompt": "ABC"}, {"id": 2, "prompt": "DE"}]
    rows = regenerate(target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=6, batch_size=1)
    read = training_rows(tokenizer, prompts, rows, max_length=5)
    assert read == [{key: row[key][:5] for key in ("input_ids", "labels")} for row in rows]
    old = {"id": 1, "answer": 0, "finished": True, "text": "FG"}
    (row,) = training_rows(tokenizer, prompts, [old])
    ids = tokenizer("ABC")["input_ids"]
    assert row["labels"] == [-100] * len(ids) + [*tokenizer("FG")["input_ids"], EOS]


# ---------------------------------------------------------------- bad options
@pytest.mark.parametrize(
    "options, words",
    [
        (("--answers", "0"), "`answers=0`"),
        (("--batch-size", "0"), "`batch_size=0`"),
        (("--limit", "0"), "`limit=0`"),
        (("--greedy", "--answers", "2"), "answers=2"),
        (("--temperature", "0", "--answers", "2"), "answers=2"),
        (("--greedy", "--top-k", "4"), "only one of"),
        (("--top-k", "4", "--generation-config", "{}"), "only one of"),
        (("--generation-config", '{"temprature": 1}'), "no field `temprature`"),
        (("--generation-config", '{"num_return_sequences": 2}'), "`answers`"),
        (("--generation-config", "[1]"), "neither a file nor"),
        (("--generation-config", "{1}"), "is not JSON"),
        (("--generation-config", '{"temperature": -1}'), "temperature"),
        (("--chat-template-kwargs", "[1]"), "JSON object"),
        (("--device", "nonsense"), "--device nonsense"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(folder, tmp_path, capsys, options, words):
    assert main(command(folder, tmp_path / "out.jsonl", *options)) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_generation_config_of_a_model_is_a_file_that_works(folder, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.5, "eos_token_id": [2], "transformers_version": "5.0.0"}))
    assert main(command(folder, tmp_path / "out.jsonl", "--generation-config", str(path))) == 0
    settings = json.loads((tmp_path / "out.meta").read_text())["settings"]
    assert settings["generation.temperature"] == 0.5 and settings["generation.do_sample"] is True
