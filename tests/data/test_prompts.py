# SPDX-License-Identifier: Apache-2.0
"""Prompt rows in every format, their ids, and what is skipped with which reason."""

import json
from collections import Counter

import pytest
from datasets import Dataset

from gto_hf.data import load_jsonl
from gto_hf.data.prompts import Conversation, conversation, read_prompts


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


def asks(row, **kwargs):
    return [list(ask) for ask in conversation(row, Counter(), **kwargs).asks]


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["A", "B"], "system": "Be brief."},
        {"messages": [SYSTEM, user("A"), assistant("x"), user("B")]},
        {"messages": [SYSTEM, user("A"), assistant("x"), user("B"), assistant("y")]},
        {"messages": [SYSTEM, user("A"), assistant("x"), assistant("x"), user("B"), assistant("y"), SYSTEM]},
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "A"},
                {"from": "gpt", "value": "x"},
                {"from": "human", "value": "B"},
                {"from": "gpt", "value": "y"},
            ]
        },
        {"messages": [SYSTEM, user([{"type": "text", "text": "A"}]), assistant("x"), user("B")]},
    ],
)
def test_every_format_asks_every_turn_and_forgets_given_answers(row):
    assert asks(row) == [[SYSTEM, user("A")], [user("B")]]


def test_given_answers_can_be_kept_as_context():
    row = {"messages": [SYSTEM, user("A"), assistant("x"), user("B"), assistant("y")]}
    assert asks(row, rewrite=False) == [[SYSTEM, user("A"), assistant("x"), user("B")]]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    tool = {"messages": [user("A"), calls, {"role": "tool", "content": "4"}, user("B")]}
    assert asks(tool, rewrite=False) == [tool["messages"]]
    with pytest.raises(ValueError, match="--no-rewrite"):
        asks(tool)


def test_messages_between_answers_stay_in_the_question_they_belong_to():
    row = {"messages": [user("A"), assistant("x"), SYSTEM, assistant("y"), user("B"), user("C")]}
    assert asks(row) == [[user("A")], [SYSTEM, user("B"), user("C")]]


def test_single_prompts_and_their_further_columns():
    row = {"id": 7, "prompt": "A", "source": "web", "language": "de", "labels": [1], "text": "z", "empty": None}
    found = conversation(row, Counter())
    assert found == Conversation("7", ((user("A"),),), {"source": "web", "language": "de"})
    assert conversation({"messages": [], "prompt": "A"}, Counter()).asks == ((user("A"),),)
    assert conversation({"prompt": [SYSTEM, user("A")]}, Counter()).asks == ((SYSTEM, user("A")),)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert conversation({"prompt": "A", "tools": json.dumps(tools)}, Counter()).tools == tools
    assert conversation({"prompt": "A", "tools": tools}, Counter()).tools == tools
    assert found.tools is None


def test_ids_are_stable_and_unique():
    def ids(rows):
        seen = Counter()
        return [conversation(row, seen).id for row in rows]

    plain = ids([{"prompt": "A"}, {"prompt": "B"}, {"prompt": "A"}, {"turns": ["A"]}])
    assert plain == ids([{"prompt": "A", "source": "x"}, {"prompt": "B"}, {"prompt": "A"}, {"prompt": "A"}])
    assert plain[2:] == [f"{plain[0]}-2", f"{plain[0]}-3"] and len(set(plain)) == 4
    assert ids([{"prompt": "B"}])[0] == plain[1]  # whatever stands before
    given = ids([{"id": key, "prompt": "A"} for key in ("a", "a-2", "a", "a")])
    assert given == ["a", "a-2", "a-3", "a-4"]
    assert ids([{"question_id": 81, "turns": ["A"]}]) == ["81"]


BAD = {
    '{"prompt": "A"': "not a JSON object",
    "[1, 2]": "not a JSON object",
    '{"question": "A", "answer": "B"}': "none of `messages`, `conversations`, `turns` and `prompt`",
    '{"prompt": "  "}': "an empty user message",
    '{"prompt": ""}': "`prompt` is empty",
    '{"messages": [], "turns": 3}': "`turns` is empty or no text and no list",
    '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "A"}]}': "not the user's",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "no user message",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "content is not text",
    '{"messages": [{"role": "user"}]}': "content is not text",
    '{"messages": [{"role": ["user"], "content": "A"}]}': "the role \\['user'\\]",
    '{"conversations": [{"from": "narrator", "value": "A"}]}': "the role 'narrator'",
    '{"turns": [["A"]]}': "neither a text nor an object",
    '{"prompt": "A", "tools": "[{"}': "`tools` is not JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_rows_are_skipped_with_a_reason_and_their_line(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "A"}}\n\n{line}\n{{"prompt": "B"}}\n')
    found, skipped = read_prompts(path)
    assert [ask[0]["content"] for each in found for ask in each.asks] == ["A", "B"]
    assert skipped.reasons.total() == 1 and str(skipped).endswith("(line 3)")
    path.write_text(f"{line}\n" * 5)
    with pytest.raises(ValueError, match=BAD[line]) as error:
        read_prompts(path)
    assert str(error.value).endswith("(line 1, line 2, line 3, ..)") and "skipped 5" in str(error.value)


def test_line_separators_within_strings_and_broken_encodings(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "A\u2028B\u0085C"}\n'.encode() + b'{"prompt": "\xff"}\n')
    found, skipped = read_prompts(path)
    assert found[0].asks == ((user("A\u2028B\u0085C"),),)
    assert skipped.reasons == {"not a JSON object": 1}
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert load_jsonl(path) == [{"prompt": "A\u2028B\u0085C"}]


def test_files_folders_and_the_packages_own_prompts(tmp_path):
    rows = [{"id": "1", "turns": ["A", "B"], "source": "x"}, {"id": "2", "turns": ["C"], "source": None}]
    Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "p.json").write_text(json.dumps(rows))
    expected = [
        Conversation("1", ((user("A"),), (user("B"),)), {"source": "x"}),
        Conversation("2", ((user("C"),),)),
    ]
    for name in ("p.parquet", "folder", "p.json"):
        assert read_prompts(tmp_path / name)[0] == expected
    assert read_prompts(str(tmp_path / "folder"), limit=1)[0] == expected[:1]
    own, skipped = read_prompts("own")
    assert len(own) >= 300 and not skipped.reasons


def test_what_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="no file `.*missing.jsonl`"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="nowhere"):
        read_prompts(str(tmp_path / "nowhere"))
    (tmp_path / "p.txt").write_text("A")
    with pytest.raises(ValueError, match="must end in"):
        read_prompts(tmp_path / "p.txt")
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="It is empty"):
        read_prompts(tmp_path / "p.jsonl")
