# SPDX-License-Identifier: Apache-2.0
"""The trainer's datasets: the same rows as TRL's where TRL has an answer, skipped rows counted, a report at the start."""

import json

import pytest
import torch
from datasets import Dataset, IterableDataset
from trl import SFTConfig, SFTTrainer, pack_dataset

from gto_hf import GTOConfig, GTOTrainer
from gto_hf.trainer import rows as trainer_rows
from tests.data.chats import CHATML, MARKED, VOCAB, chat, chat_tokenizer, shown
from tests.tiny import tiny_draft, tiny_target


OFF = {
    "report_to": "none", "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    "shuffle_dataset": False, "gto_weight": 0.0, "ttt_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2,
}  # fmt: skip
GOOD = {"messages": chat("Hi", "Hello you.", "Who?", "A bot.")}
BAD = [
    {"messages": []},
    {"messages": [{"role": "narrator", "content": "Once"}]},
    {"messages": chat("Hi")},
    {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "Hello."}]},
]


@pytest.fixture
def target():
    return tiny_target(vocab=VOCAB)


def make(target, dataset, folder, template=CHATML, *, eval_dataset=None, formatting_func=None, keep=VOCAB, **kwargs):
    return GTOTrainer(
        tiny_draft(target, vocab=keep),
        target,
        GTOConfig(str(folder), **{**OFF, **kwargs}),
        train_dataset=Dataset.from_list(dataset) if isinstance(dataset, list) else dataset,
        eval_dataset=eval_dataset,
        processing_class=chat_tokenizer(template),
        formatting_func=formatting_func,
    )


def prepared(dataset):
    return [(row["input_ids"], row["labels"]) for row in dataset]


def texts(trainer):
    return [shown(trainer.processing_class, *row) for row in prepared(trainer.train_dataset)]


def report(folder, name="train"):
    return json.loads((folder / "data_report.json").read_text())[name]


# ---------------------------------------------------------------- packed rows
def test_rows_that_come_packed_are_refused(target, tmp_path):
    rows = Dataset.from_list([{"input_ids": list(range(5, 25))}] * 4)
    packed = pack_dataset(rows, 40, strategy="bfd")
    assert "seq_lengths" in packed.column_names
    with pytest.raises(ValueError, match="packed.*another document"):
        make(target, packed, tmp_path / "a")
    restarts = [{"input_ids": list(range(5, 13)), "position_ids": [0, 1, 2, 3, 0, 1, 2, 3]}]
    whole = [{"input_ids": list(range(5, 13)), "position_ids": list(range(8))}]
    trainer = make(target, restarts + whole, tmp_path / "b")
    assert len(trainer.train_dataset) == 1
    assert report(tmp_path / "b")["skipped"] == {"several documents in one row": 1}
    stream = IterableDataset.from_generator(lambda: iter(packed))
    with pytest.raises(ValueError, match="several documents in one row"):
        make(target, stream, tmp_path / "c")


# ---------------------------------------------------------------- the same rows as TRL's
@pytest.mark.parametrize(
    "row, template, kwargs",
    [
        ({"text": "Hello you"}, CHATML, {}),
        ({"prompt": "Hello ", "completion": "you, and more"}, CHATML, {}),
        ({"prompt": "Hello ", "completion": "you"}, CHATML, {"completion_only_loss": False}),
        ({"prompt": chat("Hi"), "completion": chat("", "Hello.")[1:]}, CHATML, {}),
        ({"prompt": chat("Hi"), "completion": chat("", "Hello.")[1:]}, CHATML, {"assistant_only_loss": False}),
        (GOOD, MARKED, {"assistant_only_loss": True}),
        (GOOD, CHATML, {"assistant_only_loss": False}),
        ({"input_ids": list(range(20, 32)), "labels": [-100] * 3 + list(range(23, 32))}, CHATML, {"max_length": 9}),
        ({"input_ids": list(range(20, 26)), "assistant_masks": [0, 0, 0, 1, 1, 1]}, CHATML, {}),
        ({"input_ids": list(range(20, 26))}, CHATML, {}),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own default is an old name
def test_rows_are_those_of_sft_trainer_where_it_has_an_answer(target, tmp_path, row, template, kwargs):
    ours = make(target, [row] * 2, tmp_path / "ours", template, **kwargs)
    theirs = SFTTrainer(
        tiny_target(vocab=VOCAB),
        SFTConfig(
            str(tmp_path / "theirs"), report_to="none", bf16=False, use_cpu=True, shuffle_dataset=False, **kwargs
        ),
        train_dataset=Dataset.from_list([row] * 2),
        processing_class=chat_tokenizer(template),
    )
    assert prepared(ours.train_dataset) == prepared(theirs.train_dataset)
    assert ours.args.assistant_only_loss is kwargs.get("assistant_only_loss")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_assistant_turns_are_the_default_and_train_on_chooses_among_them(target, tmp_path, template):
    assert texts(make(target, [GOOD], tmp_path, template)) == ["·Hello you.<|im_end|>\n·A bot.<|im_end|>\n"]
    assert texts(make(target, [GOOD], tmp_path, template, train_on="last")) == ["·A bot.<|im_end|>\n"]
    # TRL refuses both of these: a template it does not know, and ShareGPT with assistant masks
    share = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert texts(make(target, [share], tmp_path, template, assistant_only_loss=True)) == ["·Hello.<|im_end|>\n"]
    with pytest.raises(ValueError, match="train_on='first'"):
        make(target, [GOOD], tmp_path, train_on="first")
    with pytest.raises(ValueError, match="assistant_only_loss=True.*plain text"):
        make(target, [{"text": "Hello you"}], tmp_path, assistant_only_loss=True)


def test_a_template_from_a_file_and_a_formatting_function_are_used(target, tmp_path):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    trainer = make(target, [GOOD], tmp_path, None, chat_template_path=str(tmp_path / "chat.jinja"))
    assert texts(trainer) == ["·[Hello you.]·[A bot.]"]
    titled = make(target, [{"title": "Hello"}], tmp_path, formatting_func=lambda row: row["title"] + " you")
    assert texts(titled) == ["Hello you</s>"]
    with pytest.raises(ValueError, match="no chat template"):
        make(target, [GOOD], tmp_path, None)


# ---------------------------------------------------------------- skipping and reporting
def test_malformed_rows_are_skipped_counted_and_reported_once(target, tmp_path, capsys):
    long = {"messages": chat("Hi", "Hello " * 30)}
    with pytest.warns(UserWarning, match="4 of 7 rows of `train_dataset` are skipped.*turn 0 has the role 'narrator'"):
        trainer = make(target, [*BAD, GOOD, long, GOOD], tmp_path, max_length=64)
    assert len(trainer.train_dataset) == 3 and len(trainer.train_dataset[1]["input_ids"]) == 64
    found = report(tmp_path)
    assert (found["rows"], found["rows_trained"], found["longest_row"]) == (7, 3, 64)
    assert found["skipped"] == {
        "empty conversation": 1, "unknown role": 1, "no assistant turn": 1, "missing content": 1,
    }  # fmt: skip
    # a column that only some rows have is None in the others
    assert found["examples"]["unknown role"] == {"row": 1, "found": "turn 0 has the role 'narrator'"}
    assert found["notes"] == {"cut at max_length": 1}
    assert trainer._rows.reports["train"].kept == 3 and trainer.model.config.trained_length == 64
    printed = capsys.readouterr().out
    assert printed.count("train_dataset: 7 rows, 3 trained on") == 1 and "1 unknown role" in printed
    assert "trained text of the first row: 'Hello you.<|im_end|> A bot.<|im_end|>'" in printed
    assert found["first_trained_text"] == "Hello you.<|im_end|>\nA bot.<|im_end|>\n"
    trainer.train()
    assert "train_dataset" not in capsys.readouterr().out  # once


def test_a_thousand_malformed_rows_at_the_start_do_no_harm(target, tmp_path):
    # more than datasets writes at once, so that a batch holds nothing but skipped rows
    # without `max_length` TRL drops nothing itself
    trainer = make(target, [{"text": ""}] * 1200 + [{"text": "Hello you"}], tmp_path, max_length=None)
    assert texts(trainer) == ["Hello you</s>"]
    assert report(tmp_path)["skipped"] == {"missing content": 1200}


@pytest.mark.parametrize("as_stream", [False, True])
def test_nothing_left_is_an_error_that_names_reasons_and_counts(target, tmp_path, as_stream):
    dataset = Dataset.from_list([*BAD, *BAD])
    dataset = dataset.to_iterable_dataset() if as_stream else dataset
    with pytest.raises(
        ValueError, match="All 8 rows.*empty conversation: 2.*unknown role: 2.*narrator.*Roles are user"
    ):
        make(target, dataset, tmp_path)


def test_rows_of_another_tokenizer_are_refused_when_most_are_wrong(target, tmp_path):
    good, foreign = {"input_ids": [20, 21, 22, 23]}, {"input_ids": [20, 21, 22, VOCAB + 5]}
    assert len(make(target, [good, foreign], tmp_path).train_dataset) == 1
    with pytest.raises(ValueError, match=f"2 of 3 rows.*token id {VOCAB + 5}.*target's tokenizer"):
        make(target, [good, foreign, foreign], tmp_path)


def test_coverage_of_the_drafts_vocabulary_is_reported_per_source(target, tmp_path):
    # the draft keeps the first 100 ids: the special tokens, and the bytes before `u`
    rows = [{"text": "abc", "source": "letters"}, {"text": "xyz", "source": "end"}, {"text": "abc", "source": None}]
    with pytest.warns(UserWarning, match="holds only 83.3%.*source=end.*draft_vocab_size"):
        make(target, rows, tmp_path, keep=100)
    # by hand: each row is three letters and </s>, of which the last two are trained; only `z` cannot be said
    tokenizer = chat_tokenizer()
    said = [tokenizer.convert_tokens_to_ids(c) < 100 for c in "cz"]
    assert said == [True, False]
    found = report(tmp_path)
    assert found["groups"]["source=letters"]["coverage"] == 1.0 and found["groups"]["source=end"]["coverage"] == 0.5
    assert found["measured"]["supervised_share"] == 0.5 and set(found["groups"]) == {"source=letters", "source=end"}


def test_large_datasets_are_measured_on_a_sample(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer_rows, "MEASURED_ROWS", 4)
    make(target, [GOOD] * 11, tmp_path)
    assert report(tmp_path)["measured"]["rows"] == 4 and report(tmp_path)["rows"] == 11
    assert "(4 rows looked at)" in capsys.readouterr().out


def test_evaluation_sets_are_prepared_in_the_same_way(target, tmp_path):
    sets = {"one": Dataset.from_list([*BAD, GOOD]), "two": Dataset.from_list([GOOD] * 2)}
    with pytest.warns(UserWarning, match="4 of 5 rows of `one_dataset`"):
        trainer = make(target, [GOOD], tmp_path, eval_dataset=sets)
    assert len(trainer.eval_dataset["one"]) == 1 and report(tmp_path, "two")["rows"] == 2
    first = trainer.evaluate()
    # rows given later are read as those given at the start
    again = trainer.evaluate(sets["one"])
    assert again["eval_token_loss"] == first["eval_one_token_loss"]
    assert again["eval_trained_tokens"] == len("Hello you." + "A bot.") + 2 + 2
    with pytest.warns(UserWarning, match="4 of 6 rows of `eval_dataset`"):
        trainer.evaluate(Dataset.from_list([*BAD, GOOD, GOOD]))
    with pytest.raises(ValueError, match="All 4 rows of `eval_dataset`"):
        trainer.evaluate(Dataset.from_list(BAD))


# ---------------------------------------------------------------- streams
def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_skip_and_count_as_they_are_read(target, tmp_path, workers):
    rows = [*BAD, GOOD, GOOD] * 6
    trainer = make(target, stream(rows), tmp_path, dataloader_num_workers=workers, max_steps=6)
    found = report(tmp_path)
    assert found["counted"] == "its first 512 rows at most" and found["skipped"]["unknown role"] == 6
    assert found["read_in_training"]["rows"] == 0
    with pytest.warns(UserWarning, match="of the stream.*'unknown role': 6"):
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "data/rows_read" in entry]
    assert len(logs) == 7
    # the loader is one batch ahead, workers are two
    assert 6 <= logs[0]["data/rows_read"] <= 36 and logs[0]["trained_tokens"] == 2 * len("Hello you.A bot.") + 8
    assert logs[-1]["data/rows_read"] == 36 and logs[-1]["data/rows_skipped"] == 24
    assert report(tmp_path)["read_in_training"]["skipped"] == {
        "empty conversation": 6, "unknown role": 6, "no assistant turn": 6, "missing content": 6,
    }  # fmt: skip


def test_a_stream_is_the_same_rows_as_its_dataset(target, tmp_path):
    rows = [*BAD, GOOD, {"messages": chat("a", "b c")}]
    as_rows, as_stream = make(target, rows, tmp_path), make(target, stream(rows), tmp_path)
    assert prepared(as_rows.train_dataset) == prepared(as_stream.train_dataset)
    typed = make(target, Dataset.from_list(rows).to_iterable_dataset(), tmp_path)
    assert prepared(as_rows.train_dataset) == prepared(typed.train_dataset)


# ---------------------------------------------------------------- rows that are used as they are
def test_unprepared_rows_are_looked_at_and_left_alone(target, tmp_path):
    kwargs = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 5}
    good = {"input_ids": list(range(20, 30)), "labels": list(range(20, 30))}
    short = {"input_ids": [20, 21], "labels": [20, 21]}
    with pytest.warns(UserWarning, match="1 of 2 rows.*too short"):
        trainer = make(target, [good, short], tmp_path, **kwargs)
    assert prepared(trainer.train_dataset) == [tuple(good.values()), tuple(short.values())]
    assert trainer.model.config.trained_length == 10
    with pytest.raises(ValueError, match="All 2 rows"):
        make(target, [short] * 2, tmp_path, **kwargs)
    lazy = Dataset.from_list([{"n": 20}]).with_transform(lambda batch: {"input_ids": [[n] * 4 for n in batch["n"]]})
    make(target, lazy, tmp_path, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)


def test_torch_formatted_rows_and_several_processes_work(target, tmp_path):
    ids = list(range(20, 30))
    dataset = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 4).with_format("torch")
    trainer = make(target, dataset, tmp_path, dataset_num_proc=2)
    trainer.train()
    assert torch.as_tensor(trainer.train_dataset[0]["input_ids"]).tolist() == ids
