# SPDX-License-Identifier: Apache-2.0
"""Rows of every format as ids and labels: what is trained, what is skipped and why."""

import json

import numpy
import pytest
import torch
from datasets import Dataset

from gto_hf.data import RowEncoder, dataset_token_counts
from gto_hf.data.conversations import read_messages, without_leading_answers
from gto_hf.data.encode import NOTES
from gto_hf.data.report import DataReport

from .chats import CHATML, MARKED, SPECIAL, VOCAB, chat, chat_tokenizer, real_template, shown


def encoder(template=CHATML, **kwargs):
    return RowEncoder(chat_tokenizer(template), VOCAB, **kwargs)


def trained(row, template=CHATML, **kwargs):
    """The trained text of a row."""
    made = encoder(template, **kwargs)
    ids, labels, _ = made.encode(row)
    return shown(made.tokenizer, ids, labels)


def notes(row, template=CHATML, **kwargs):
    return encoder(template, **kwargs)(row)[NOTES]


TWO_TURNS = chat("Hi", "Hello you.", "Who?", "A bot.")


# ---------------------------------------------------------------- formats
@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("Hi", "Hello.")},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "chatgpt", "value": "Hello."}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Hello."}]},
        {"messages": [{"role": "Human", "content": "Hi"}, {"role": "model", "content": "Hello."}]},
        {"prompt": chat("Hi"), "completion": [{"role": "assistant", "content": "Hello."}]},
        {"prompt": "Hi", "messages": chat("Hi", "Hello.")},  # UltraChat's columns
        {"prompt": None, "completion": None, "text": None, "messages": chat("Hi", "Hello.")},
        {"messages": [{**turn, "tool_calls": None} for turn in chat("Hi", "Hello.")]},
        {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in chat("Hi", "Hello.")]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_spelling_of_a_conversation_gives_the_same_row(row, template):
    made = encoder(template)
    ids, labels, found = made.encode(row)
    assert made.tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert shown(made.tokenizer, ids, labels) == "·Hello.<|im_end|>\n"
    assert found == []


def test_text_and_prompts_with_completions_end_with_eos():
    assert trained({"text": "Hello you"}) == "Hello you</s>"
    assert trained({"text": "Hello you</s>"}) == "Hello you</s>"
    assert trained({"story": "Hello you"}, text_field="story") == "Hello you</s>"
    assert trained({"prompt": "Hello ", "completion": "you"}) == "·you</s>"
    assert trained({"prompt": "Hello ", "completion": "you"}, completion_only=False) == "Hello you</s>"
    assert trained({"title": "Hello"}, formatting_func=lambda row: row["title"] + " you") == "Hello you</s>"


@pytest.mark.parametrize("name", [CHATML, MARKED, "qwen3", "qwen2_5", "llama3", "gemma", "phi3", "lfm2"])
@pytest.mark.parametrize("kwargs", [{}, {"train_on": "last"}, {"assistant_only": False}])
def test_an_answer_that_was_cut_is_trained_without_an_end_that_nobody_wrote(name, kwargs):
    template = name if name in (CHATML, MARKED) else real_template(name)
    made = encoder(template, **kwargs)
    whole, cut = ({"messages": TWO_TURNS, "finished": finished} for finished in (True, False))
    (ids, labels, _), (cut_ids, cut_labels, _) = made.encode(whole), made.encode(cut)
    assert ids[: len(cut_ids)] == cut_ids and labels[: len(cut_ids)] == cut_labels
    assert made.tokenizer.decode(cut_ids).endswith("A bot.") and len(cut_ids) < len(ids)
    assert cut_labels[-1] == cut_ids[-1]
    assert (
        made.encode({"messages": TWO_TURNS})
        == made.encode({"messages": TWO_TURNS, "finished": None})
        == made.encode(whole)
    )


CUT = ["cut answer (`finished` false) trained without an end of turn"]


@pytest.mark.parametrize("false", [False, numpy.False_, torch.tensor(False)])
def test_cut_answers_of_other_formats(false):
    assert trained({"prompt": "Hello ", "completion": "you", "finished": false}) == "·you"
    assert trained({"text": "Hello you", "finished": false}) == "Hello you"
    split = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:], "finished": false}
    assert trained(split) == "·A bot."
    for row in (split, {"messages": TWO_TURNS, "finished": false}, {"text": "Hello you", "finished": false}):
        assert notes(row) == CUT
    for other in (True, None, 0, "no"):  # of another meaning
        assert notes({"messages": TWO_TURNS, "finished": other}) == []


def test_a_cut_conversation_that_starts_with_an_answer_loses_only_that():
    row = {"messages": [{"role": "assistant", "content": "Welcome."}, *TWO_TURNS], "finished": False}
    assert trained(row) == "·Hello you.<|im_end|>\n·A bot."


def test_calls_and_thoughts_of_a_cut_answer_stay():
    template = real_template("qwen3")
    call = {"type": "function", "function": {"name": "look", "arguments": {"up": 1}}}
    asked = {**chat("Hi", "Wait.")[1], "tool_calls": [call]}
    for answer in (asked, {**asked, "content": ""}):
        row = {"messages": [*chat("Hi"), answer], "finished": False}
        assert trained(row, template).endswith("</tool_call>")
        assert trained({**row, "finished": True}, template).endswith("</tool_call><|im_end|>\n")
    inline = {
        "messages": [*chat("Hi"), {"role": "assistant", "content": "<think>Hm.</think>A bot"}],
        "finished": False,
    }
    assert trained(inline, template).endswith("</think>\n\nA bot")
    thought = {"messages": [*chat("Hi"), {"role": "assistant", "content": "", "reasoning_content": "Hm"}]}
    assert notes({**thought, "finished": False}, template) == [
        "a cut answer whose end cannot be told from the template's"
    ]


def test_ids_are_taken_as_they_are():
    ids = list(range(20, 26))
    labels = [-100, -100, -100, 23, -100, 25]
    mask = [0, 0, 0, 1, 0, 1]
    for row in ({"labels": labels}, *({name: mask} for name in ("assistant_masks", "completion_mask", "loss_mask"))):
        assert encoder().encode({"input_ids": ids, **row}) == (ids, labels, [])
        assert encoder(train_on="last").encode({"input_ids": ids, **row}) == (ids, labels, [])
    assert encoder().encode({"input_ids": ids})[1] == ids
    both = {"input_ids": ids, "completion_mask": mask, "assistant_masks": [1, 1, 1, 1, 0, 0]}
    assert encoder().encode(both)[1] == [-100, -100, -100, 23, -100, -100]
    assert encoder(completion_only=False).encode(both)[1] == [20, 21, 22, 23, -100, -100]
    assert encoder().encode({"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)})[0] == ids
    # ids win over text that would be rendered
    assert encoder().encode({"input_ids": ids, "labels": labels, "messages": TWO_TURNS})[0] == ids


# ---------------------------------------------------------------- which turns are trained
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_that_are_trained(template):
    row = {"messages": TWO_TURNS}
    assert trained(row, template) == "·Hello you.<|im_end|>\n·A bot.<|im_end|>\n"
    assert trained(row, template, train_on="last") == "·A bot.<|im_end|>\n"
    open_end = {"messages": [*TWO_TURNS, {"role": "user", "content": "Bye"}]}
    assert trained(open_end, template, train_on="last") == "·A bot.<|im_end|>\n·"
    whole = trained(row, template, assistant_only=False)
    assert "·" not in whole and whole.startswith("<|im_start|>user\nHi")
    split = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    assert trained(split, template) == "·A bot.<|im_end|>\n"
    assert trained(split, template, assistant_only=False) == "·A bot.<|im_end|>\n"
    assert trained(split, template, completion_only=False) == "·Hello you.<|im_end|>\n·A bot.<|im_end|>\n"


@pytest.mark.parametrize(
    "name", ["llama3", "gemma", "gemma3", "phi3", "phi3_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2_v2", "smolvlm"]
)
def test_masks_of_real_templates_are_those_of_their_marked_versions(name):
    """TRL ships the same templates with and without `{% generation %}`: both ways must train the same tokens."""
    rows = [{"messages": TWO_TURNS}, {"messages": chat("a", "b c", "d", " e\n", "f", "g")}]
    for row in rows:
        for mode in ("all", "last"):
            derived = encoder(real_template(name), train_on=mode).encode(row)
            marked = encoder(real_template(f"{name}_training"), train_on=mode).encode(row)
            assert derived[1] == marked[1] and derived[0] == marked[0]
            answers = [turn["content"].strip() for turn in row["messages"] if turn["role"] == "assistant"]
            answers = answers[-1:] if mode == "last" else answers
            parts = trained(row, real_template(name), train_on=mode).split("·")[1:]
            assert len(parts) >= len(answers)
            assert all(part.strip().startswith(answer) for part, answer in zip(parts, answers, strict=False))


def test_a_turn_that_the_template_renders_differently_later_is_not_trained():
    # Qwen3 drops the reasoning of earlier turns, so what stands in the history is not what the target wrote
    row = {"messages": chat("Hi", "<think>\nhm\n</think>\n\nHello.", "Who?", "<think>\nwell\n</think>\n\nA bot.")}
    template = real_template("qwen3")
    assert trained(row, template) == "·<think>\nwell\n</think>\n\nA bot.<|im_end|>\n"
    assert notes(row, template) == ["some answers not trained: the chat template rewrites them"]
    assert notes(row, template, train_on="last") == []
    assert trained(row, template, train_on="last") == trained(row, template)


def test_the_common_start_of_two_renderings_is_not_an_answer():
    # both renderings of the first answer begin with a line break; it alone must not be trained
    template = CHATML.replace("'\n' + m['content']", "'\n\n' + (m if loop.last else stripped(m))").replace(
        "{% for", "{% macro stripped(m) %}{{ m['content'].split('</think>')[-1] }}{% endmacro %}{% for", 1
    ).replace("(m if", "(m['content'] if")  # fmt: skip
    row = {"messages": chat("Hi", "<think>hm</think>Hello.", "Who?", "A bot.")}
    assert trained(row, template) == "·\nA bot.<|im_end|>\n"
    assert notes(row, template) == ["some answers not trained: the chat template rewrites them"]


def test_a_row_whose_every_answer_is_rewritten_is_skipped():
    # R1 prompts the target with `<think>`, but renders answers without their reasoning
    row = {"messages": chat("Hi", "<think>\nhm\n</think>\n\nHello.")}
    assert notes(row, real_template("deepseek_r1_distill")) == ["answers rewritten by the chat template"]


def test_reasoning_that_a_template_drops_or_adds_is_counted():
    dropping = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    row = {"messages": chat("Hi", "<think>hm, well</think>Hello.")}
    assert trained(row, dropping) == "·Hello.<|im_end|>\n"
    assert notes(row, dropping) == ["reasoning dropped by the chat template"]
    assert notes(row) == []
    own_key = {"messages": [*chat("Hi"), {"role": "assistant", "content": "Hello.", "reasoning_content": "hm"}]}
    assert notes(own_key) == ["reasoning dropped by the chat template"]
    qwen = real_template("qwen3")
    assert trained(own_key, qwen) == "·<think>\nhm\n</think>\n\nHello.<|im_end|>\n" and notes(own_key, qwen) == []
    plain = {"messages": chat("Hi", "Hello.")}
    assert notes(plain, qwen) == ["reasoning block added by the chat template"]
    off = {**plain, "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    assert trained(off, qwen) == "·Hello.<|im_end|>\n" and notes(off, qwen) == []
    # the ids that the target generated are trained as they are, whatever the template would do
    made = encoder(dropping)
    prompt = made.tokenizer.apply_chat_template(chat("Hi"), add_generation_prompt=True)["input_ids"]
    written = made.tokenizer("<think>hm, well</think>Hello.<|im_end|>")["input_ids"]
    ids, labels, found = made.encode({"input_ids": prompt + written, "labels": [-100] * len(prompt) + written})
    assert ids == prompt + written and found == []
    assert shown(made.tokenizer, ids, labels) == "·<think>hm, well</think>Hello.<|im_end|>"


def test_tool_calls_tools_and_tool_turns():
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}]
    template = real_template("qwen3_instruct_2507")
    row = {"messages": messages, "tools": json.dumps(tools)}
    text = trained(row, template)
    assert text == '·<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n·Two.<|im_end|>\n'
    assert encoder(template).encode(row) == encoder(template).encode({"messages": messages, "tools": tools})
    assert "# Tools" in chat_tokenizer().decode(encoder(template).encode(row)[0])
    assert notes({"messages": messages, "tools": "[{"}, template) == ["refused by the chat template"]


def test_a_leading_answer_is_left_out():
    turns = [
        {"from": "gpt", "value": "Welcome."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello."},
    ]
    assert trained({"conversations": turns}) == "·Hello.<|im_end|>\n"
    assert "Welcome" not in chat_tokenizer().decode(encoder().encode({"conversations": turns})[0])
    assert notes({"conversations": turns}) == ["leading assistant turn left out"]
    messages = read_messages([{"from": "system", "value": "Be kind."}, *turns])
    assert [m["role"] for m in without_leading_answers(messages)] == ["system", "user", "assistant"]
    # every token of it is trained where every token was asked for
    assert "Welcome" in trained({"conversations": turns}, assistant_only=False)


# ---------------------------------------------------------------- cutting
def test_rows_are_cut_and_counted():
    ids = list(range(20, 40))
    row = {"input_ids": ids, "labels": [-100] * 8 + ids[8:]}
    assert encoder(max_length=20)(row)[NOTES] == []
    cut = encoder(max_length=10)(row)
    assert cut["input_ids"] == ids[:10] and cut["labels"] == row["labels"][:10] and cut[NOTES] == ["cut at max_length"]
    assert encoder(max_length=10, keep_end=True)(row)["input_ids"] == ids[-10:]
    assert encoder(max_length=8)(row)[NOTES] == ["longer than max_length before the first trained token"]


# ---------------------------------------------------------------- malformed rows
MALFORMED = [
    ({"messages": []}, "empty conversation"),
    ({"conversations": [{"from": "narrator", "value": "Once"}]}, "unknown role"),
    ({"messages": [{"content": "Hi"}]}, "unknown role"),
    ({"messages": chat("Hi")}, "no assistant turn"),
    ({"messages": chat("", "Hello.")[1:]}, "no assistant turn"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "Hello."}]}, "missing content"),
    ({"messages": chat("Hi", " \n")}, "missing content"),
    ({"messages": None, "text": None}, "missing content"),
    ({"text": "  "}, "missing content"),
    ({"prompt": "Hi"}, "missing content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text"),
    ({"messages": "Hi"}, "content is not text"),
    ({"messages": ["Hi", "Hello."]}, "content is not text"),
    ({"prompt": "Hi", "completion": chat("Hi", "Hello.")[1:]}, "content is not text"),
    ({"text": 5}, "content is not text"),
    ({"input_ids": [20, 21, 22, VOCAB]}, "token id outside the vocabulary"),
    ({"input_ids": [20, 21, 22, -1]}, "token id outside the vocabulary"),
    ({"input_ids": [20, 21, None, 22]}, "token id outside the vocabulary"),
    ({"input_ids": [20, 21, 22, 23], "labels": [20, 21, 22]}, "labels of another length"),
    ({"input_ids": [20, 21, 22, 23], "loss_mask": [1, 1, 1]}, "labels of another length"),
    ({"input_ids": [20, 21, 22], "labels": [-100] * 3}, "nothing marked for training"),
    ({"input_ids": [20, 21, 22], "labels": [20, 21, -100]}, "too short to have a trainable token"),
    ({"input_ids": [20, 21]}, "too short to have a trainable token"),
    ({"input_ids": []}, "too short to have a trainable token"),
]


@pytest.mark.parametrize("row, reason", MALFORMED)
def test_malformed_rows_are_skipped_with_their_reason(row, reason):
    made = encoder()
    assert made(row) == {"input_ids": [], "labels": [], NOTES: [reason]}
    with pytest.raises(ValueError, match=reason):
        made.encode(row)


def test_rows_that_a_template_refuses_are_skipped_and_a_missing_template_is_an_error():
    row = {"messages": [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello.")]}
    assert notes(row, real_template("gemma")) == ["refused by the chat template"]
    assert notes({"messages": chat("Hi", "Hello.")}, "{% for m in messages %}{{ m['role'] }} {% endfor %}") == [
        "refused by the chat template"
    ]
    with pytest.raises(ValueError, match="no chat template"):
        encoder(None)(row)


def test_assistant_only_refuses_rows_without_an_assistant():
    for row in ({"text": "Hello you"}, {"prompt": "Hello ", "completion": "you"}):
        assert notes(row, assistant_only=True) == ["no assistant turn"]
    assert notes({"input_ids": [20, 21, 22, 23]}, assistant_only=True) == ["nothing marked for training"]
    assert trained({"messages": chat("Hi", "Hello.")}, assistant_only=True) == "·Hello.<|im_end|>\n"


# ---------------------------------------------------------------- token counts
def test_token_counts_take_every_format_and_skip_malformed_rows():
    tokenizer = chat_tokenizer()
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    rows = [
        {"conversations": share},
        {"messages": chat("Hi", "Hello.")},
        {"prompt": chat("Hi"), "completion": chat("Hi", "Hello.")[1:]},
    ]
    counts = [dataset_token_counts([row], tokenizer, VOCAB) for row in rows]
    ids = tokenizer.apply_chat_template(chat("Hi", "Hello."))["input_ids"]
    assert all(torch.equal(c, torch.bincount(torch.tensor(ids), minlength=VOCAB)) for c in counts)
    mixed = [*rows, *({**row} for row, reason in MALFORMED if reason in ("empty conversation", "unknown role"))]
    with pytest.warns(UserWarning, match="3 of 6 rows.*unknown role: 2 .row 4: turn 0 has the role 'narrator'"):
        assert torch.equal(dataset_token_counts(mixed, tokenizer, VOCAB), sum(counts))
    text = dataset_token_counts(Dataset.from_list([{"story": "abca"}]), tokenizer, VOCAB, text_field="story")
    assert text.sum() == 5 and text[tokenizer.convert_tokens_to_ids("a")] == 2
    assert text[SPECIAL.index("</s>")] == 1
    with pytest.raises(ValueError, match="'question'"):
        dataset_token_counts([{"question": "Hi"}], tokenizer, VOCAB)


# ---------------------------------------------------------------- report
def test_a_report_measures_shares_and_coverage_per_group():
    report = DataReport("train_dataset")
    sayable = torch.arange(100).numpy() < 50
    report.count(6, [])
    report.measure([10, 11, 12, 60, 61, 13], [-100, 11, 12, 60, -100, 13], sayable, ["source=a"])
    report.count(4, ["cut at max_length"])
    report.measure([10, 11, 60, 61], [-100, -100, 60, 61], sayable, ["source=b"])
    report.count(0, ["empty conversation"])
    # by hand: of 10 tokens, 3 + 2 are trained (the second one has no feature before it), 2 + 0 of them below 50
    assert (report.whole.tokens, report.whole.supervised, report.whole.sayable) == (10, 5, 2)
    assert report.groups["source=a"].coverage == 2 / 3 and report.groups["source=b"].coverage == 0
    content = report.to_dict()
    assert content["rows"] == 3 and content["rows_trained"] == 2 and content["skipped"] == {"empty conversation": 1}
    assert content["longest_row"] == 6 and content["measured"]["coverage"] == 0.4
    low = report.warnings()[-1]
    assert "40.0%" in low and "source=b 0.0%" in low and "draft_vocab_size" in low
    assert "1 empty conversation" in str(report) and "source=a: 50.0%, 66.7%" in str(report)


def test_a_report_tells_apart_a_limited_number_of_groups():
    report = DataReport("train_dataset")
    for i in range(60):
        report.count(3, [])
        report.measure([1, 2, 3], [1, 2, 3], torch.ones(5).bool().numpy(), [f"source={i}"])
    assert len(report.groups) == 51 and report.groups["(others)"].rows == 10
