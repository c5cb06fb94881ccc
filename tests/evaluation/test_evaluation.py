# SPDX-License-Identifier: Apache-2.0
"""Counts, ratios and question sets, by hand."""

import json

import pytest

from gto_hf import DecodingStatistics
from gto_hf.data import regenerate, training_rows
from gto_hf.evaluation import (
    PLAIN,
    PromptRun,
    Question,
    SystemRun,
    answer,
    compare,
    load_questions,
    prompts_hash,
    results_table,
    spread,
)
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer


def counts(*rounds):
    """Statistics of a run with the given (accepted, bonus) rounds."""
    s = DecodingStatistics(runs=1, target_forwards=1, emitted_tokens=1)
    for accepted, bonus in rounds:
        s.add_rounds([(accepted, bonus)], 10)
    return s


def test_acceptance_length_by_hand():
    a = counts((2, True), (0, True), (3, False))  # 3 + 1 + 3 tokens in 3 rounds, the last one cut
    assert a.tau == pytest.approx(7 / 3) and a.mean_accepted == pytest.approx(5 / 3)
    assert a.accepted_histogram == [1, 0, 1, 1] and a.emitted_tokens == 8 and a.target_forwards == 4
    b = counts((1, True))
    assert (a + b).tau == pytest.approx(9 / 4) and (a + b).accepted_histogram == [1, 1, 1, 1]
    assert sum([a, b], DecodingStatistics()) == a + b


def test_macro_and_micro_averages_differ_as_they_should():
    run = SystemRun("draft", 0.0)
    run.answers = [
        PromptRun([1, 2, 3, 4], 1.0, counts((2, True))),
        PromptRun([1, 2, 3], 1.0, counts((0, True), (0, True))),
        PromptRun([1], 0.5, counts()),  # ended at its first token: no round
    ]
    assert run.tau_macro == pytest.approx((3 + 1) / 2)
    assert run.tau_micro == pytest.approx(5 / 3)
    assert run.tokens_per_second == pytest.approx(8 / 2.5)


def test_speedup_identity_and_repetition_by_hand():
    plain, fast = SystemRun(PLAIN, 0.0), SystemRun("draft", 0.0)
    plain.answers = [PromptRun([1, 2, 1, 2, 1, 2], 2.0), PromptRun([5], 1.0)]
    fast.answers = [PromptRun([1, 2, 1, 2, 1, 2], 1.0), PromptRun([6], 0.5)]
    assert fast.speedup(plain) == pytest.approx(2.0) and fast.identical(plain) == 1
    # 4-grams: 1212, 2121, 1212: one of three was there before
    assert plain.repetition() == pytest.approx(1 / 3)
    assert "| 0 | draft | 4.7 | 2.00 |" in results_table([plain, fast])


def test_question_rows_in_three_formats(tmp_path):
    rows = [
        {"turns": ["a", "b"]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "x"},
            ]
        },
        {"prompt": "p", "id": 7},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    a, b, c = load_questions(path)
    assert a.turns == ("a", "b") and c.id == "7" and c.set == "mine"
    assert b.messages(0, []) == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert [m["content"] for m in a.messages(1, ["answer"])] == ["a", "answer", "b"]
    path.write_text('{"question": "?"}')
    with pytest.raises(ValueError, match="Row 0.*question"):
        load_questions(path)
    for missing in ("nothing.jsonl", "onw"):
        with pytest.raises(ValueError, match="chat, code, math"):
            load_questions(missing)
    path.write_text("not json")
    with pytest.raises(ValueError, match="line 1"):
        load_questions(path)


def test_own_sets_and_hash():
    own = load_questions("own")
    assert len(own) == 90 and {q.set for q in own} == {"chat", "code", "math"}
    assert [q for q in own if q.set == "math"] == load_questions("math")
    some = spread(own, 30)
    assert len(some) == 30 and {q.set for q in some} == {"chat", "code", "math"}
    assert prompts_hash(own) != prompts_hash(some) and len(prompts_hash(own)) == 12


def test_all_systems_answer_the_same_prompts_and_the_same_text():
    target, tokenizer = tiny_target(), tiny_tokenizer()
    draft = tiny_draft(target)
    questions = [Question("1", "s", ("ABCD", "EFG")), Question("2", "s", ("HIJK",))]
    runs = compare(target, tokenizer, questions, {"d": draft}, temperatures=(0.0, 1.0), max_new_tokens=12)
    assert [(r.name, r.temperature) for r in runs] == [(PLAIN, 0.0), ("d", 0.0), (PLAIN, 1.0), ("d", 1.0)]
    for plain, fast in (runs[:2], runs[2:]):
        assert fast.identical(plain) == 3 == len(fast.answers)
        assert fast.statistics.emitted_tokens == fast.new_tokens


def test_sampling_is_from_the_whole_distribution_of_the_target(monkeypatch):
    """What the target's generation config cuts off is not cut off; its other processors stay."""
    target, kept = tiny_target(), []
    real = type(target)._get_logits_processor

    def spy(self, *args, **kwargs):
        kept.append(real(self, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(type(target), "_get_logits_processor", spy)
    cuts = {
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.9,
        "top_h": 0.4,
        "typical_p": 0.5,
        "epsilon_cutoff": 0.1,
        "eta_cutoff": 0.1,
    }
    target.generation_config.update(do_sample=True, temperature=0.2, repetition_penalty=1.5, **cuts)
    for temperature in (0.7, 0.0):
        answer(target, [5, 6], temperature=temperature, max_new_tokens=2)
    sampled, greedy = kept
    assert [type(each).__name__ for each in sampled] == ["RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper"]
    assert sampled[1].temperature == 0.7
    assert [type(each).__name__ for each in greedy] == ["RepetitionPenaltyLogitsProcessor"]


def test_regenerated_answers_are_the_same_after_an_interruption(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    prompts = [{"id": str(i), "prompt": "ABCDEFGH"[: 3 + i % 4]} for i in range(5)]
    kwargs = {"answers": 2, "max_new_tokens": 8, "batch_size": 2}
    whole = regenerate(target, tokenizer, prompts, tmp_path / "a.jsonl", **kwargs)
    assert len(whole) == 10
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "b.meta").write_text((tmp_path / "a.meta").read_text())
    for cut in (0, 37, len(text) // 2, len(text) - 3):
        (tmp_path / "b.jsonl").write_text(text[:cut])
        assert regenerate(target, tokenizer, prompts, tmp_path / "b.jsonl", **kwargs) == whole
        assert (tmp_path / "b.jsonl").read_text() == text
    rows = training_rows(tokenizer, prompts, whole, max_length=9)
    assert all(len(r["input_ids"]) == len(r["labels"]) <= 9 for r in rows)
    prompt = tokenizer("ABC")["input_ids"]
    assert rows[0]["labels"][: len(prompt)] == [-100] * len(prompt)
    with pytest.raises(ValueError, match="none of the 1 prompts"):
        training_rows(tokenizer, prompts[:1], whole)
