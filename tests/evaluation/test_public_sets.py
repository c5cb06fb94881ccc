# SPDX-License-Identifier: Apache-2.0
"""The field's question sets load as they are published; they are not part of this project."""

from pathlib import Path

import pytest

from gto_hf.evaluation import load_questions


FOLDER = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the public question sets do not lie beside this checkout")
@pytest.mark.parametrize("name, turns", [("mt_bench", 2), ("humaneval", 1), ("gsm8k", 1)])
def test_a_public_set_has_its_80_questions(name, turns):
    questions = load_questions(FOLDER / f"{name}.jsonl")
    assert len(questions) == 80 and len({q.id for q in questions}) == 80
    assert {len(q.turns) for q in questions} == {turns}
    shipped = {turn for q in load_questions("own") for turn in q.turns}
    assert not shipped & {turn for q in questions for turn in q.turns}
