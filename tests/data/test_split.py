# SPDX-License-Identifier: Apache-2.0
"""Held-out rows ask nothing that training rows ask."""

import pytest

from gto_hf.data import hold_out


def chat(question, answer, kind="messages"):
    roles = ("user", "assistant") if kind == "messages" else ("human", "gpt")
    names = ("role", "content") if kind == "messages" else ("from", "value")
    return {kind: [dict(zip(names, pair, strict=True)) for pair in zip(roles, (question, answer), strict=True)]}


FORMATS = {
    "ids": lambda q, a: {"input_ids": [q, 9, 50 + a], "labels": [-100, -100, 50 + a]},
    "messages": lambda q, a: chat(str(q), str(a)),
    "conversations": lambda q, a: chat(str(q), str(a), "conversations"),
    "prompt": lambda q, a: {"prompt": str(q), "completion": str(a)},
}


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_to_one_question_stay_together(kind):
    made = [(q, a) for a in range(4) for q in range(20)]
    rows = [FORMATS[kind](q, a) for q, a in made]
    train, test = hold_out(rows, 0.1)
    asked = [{made[rows.index(row)][0] for row in side} for side in (train, test)]
    assert not asked[0] & asked[1] and len(asked[1]) == 2 and len(test) == 8 and len(train) == 72
    assert train == [row for row in rows if row in train]
    assert hold_out(rows, 0.1) == (train, test) != hold_out(rows, 0.1, seed=1)


def test_something_is_always_left_to_train_on_and_to_measure():
    train, test = hold_out([{"prompt": "a"}, {"prompt": "b"}], 0.9)
    assert len(train) == len(test) == 1
    train, test = hold_out([{"text": "a"}, {"text": "b"}, {"text": "c"}])
    assert len(train) == 2 and len(test) == 1
    with pytest.raises(ValueError, match="2 rows ask 1 question"):
        hold_out([{"prompt": "a"}, {"prompt": "a"}])
