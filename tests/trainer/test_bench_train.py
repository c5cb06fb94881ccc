# SPDX-License-Identifier: Apache-2.0
"""`gto-hf bench train`: its steps are the trainer's, its naive loop gives the same rewards, its books balance."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from gto_hf import GTOConfig, GTOTrainer, TreeConfig
from gto_hf.cli import main
from gto_hf.gto import SequencePrefix, plan_groups, read_target, sample_groups
from gto_hf.trainer import bench_script
from gto_hf.trainer.bench import (
    MODES,
    PHASE_I,
    PHASE_II,
    NaiveResult,
    NaiveRound,
    bench_train,
    make_steppers,
    sample_rows,
)
from gto_hf.trainer.clock import PARTS, Clock, Step, Stepper
from gto_hf.trainer.naive import naive_rewards, node_log_probs
from tests.families import FAMILIES
from tests.tiny import EOS, tiny_draft, tiny_target, tiny_tokenizer


TREE = TreeConfig(3, 3, 8)
KEPT = MODES[2].name


def texts(count, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (count, length), generator=generator).tolist()


def read(target, draft, row):
    ids = torch.tensor([row])
    return read_target(target, ids, torch.ones_like(ids), draft.config.feature_layers, 1, len(row) - 1, use_cache=True)


# ---------------------------------------------------------------- the naive loop
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_naive_loop_gives_the_rewards_of_the_fast_way(name):
    torch.manual_seed(0)
    target = FAMILIES[name].build().eval()
    draft, reference = (tiny_draft(target, vocab=60, tree=TREE, seed=seed) for seed in (1, 2))
    row = texts(1, 30)[0]
    reading = read(target, draft, row)
    roots = torch.zeros(1, 30, dtype=torch.bool)
    roots[0, 1:29] = True
    groups, valid = sample_groups(roots, 4, 5, torch.Generator().manual_seed(0))
    # Tokens that end a text stand in the trees, and a high temperature makes their nodes likely.
    grown = SequencePrefix(draft, reading.sequences).grow(groups.flatten(1), TREE).tokens[:, 1:]
    ending = grown.flatten().bincount().topk(2).indices
    options = {"temperature": 3.0, "aggregation": "lse", "eta": 2.0}
    plan = plan_groups(
        draft, reference, reading.sequences, groups, valid, TREE, target, reading.cache, reading.readout, ending,
        **options,
    )  # fmt: skip
    made = naive_rewards(
        draft, reference, reading.sequences, groups.flatten(), TREE, target, reading.cache, ending, **options
    )
    torch.testing.assert_close(made.rewards, plan.rewards.flatten(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(made.reference_rewards, plan.reference_rewards.flatten(), atol=2e-6, rtol=1e-6)
    assert not torch.allclose(made.rewards, made.reference_rewards, atol=1e-3)  # they could have been told apart
    assert made.target_tokens == 20 * 2 * 9 > plan.target_nodes
    assert reading.cache.get_seq_length() == int(groups.min())


def test_the_naive_loop_reads_what_plain_forwards_of_each_path_say(llama, draft):
    row = texts(1, 16)[0]
    reading = read(llama, draft, row)
    tree = SequencePrefix(draft, reading.sequences).grow(torch.tensor([[9]]), TREE)
    found = node_log_probs(llama, reading.cache, tree, 9, reading.sequences, torch.tensor([EOS]))[0]
    for node in range(1, 9):
        path, at = [], node
        while at:
            path, at = [int(tree.tokens[0, at]), *path], int(tree.parents[0, at])
        with torch.no_grad():
            says = llama(torch.tensor([row[:10] + path[:-1]])).logits[0, -1].log_softmax(-1)
        expected = -torch.inf if EOS in path[:-1] else says[path[-1]]
        assert float(found[node]) == pytest.approx(float(expected), abs=1e-4)


def test_the_naive_loop_refuses_what_it_cannot_take(llama, draft):
    reading = read(llama, draft, texts(1, 12)[0])
    given = (TREE, llama, reading.cache, torch.tensor([EOS]))
    with pytest.raises(ValueError, match="must ascend"):
        naive_rewards(draft, draft, reading.sequences, torch.tensor([5, 4]), *given)
    two = read_target(
        llama, torch.tensor(texts(2, 12)), torch.ones(2, 12).long(), draft.config.feature_layers, 1, 5, use_cache=True
    )
    with pytest.raises(ValueError, match="one row"):
        naive_rewards(draft, draft, two.sequences, torch.tensor([4, 5]), *given)


# ---------------------------------------------------------------- steps
def trainer_of(draft, target, rows, folder, **kwargs):
    args = GTOConfig(
        str(folder), max_steps=2, lr_scheduler_type="constant", learning_rate=1e-3, save_strategy="no",
        report_to="none", report=False, eval_prompts=0, disable_tqdm=True, bf16=False, num_groups=2, group_size=3,
        **kwargs,
    )  # fmt: skip
    dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    return GTOTrainer(draft, target, args, train_dataset=dataset, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_step_is_the_trainers_own_to_the_bit(llama, draft, tmp_path, mode):
    rows, start = texts(1, 24), copy.deepcopy(draft.state_dict())
    other = copy.deepcopy(draft)
    trainer_of(draft, llama, rows, tmp_path / "a", **mode.options).train()
    stepper = Stepper(trainer_of(other, llama, rows, tmp_path / "b", **mode.options), Clock(torch.device("cpu")))
    steps = [stepper.step(rows) for _ in range(2)]
    for name, value in draft.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not torch.equal(draft.lm_head.weight, start["lm_head.weight"])
    for step in steps:
        assert step.trained_tokens == 22 and step.tree_roots == (6 if mode.naive_trees else 0)
        assert set(step.parts) == set(PARTS) and step.other >= 0  # no part is counted twice
        busy = {name for name, seconds in step.parts.items() if seconds > 0}
        trees = {"trees", "scoring"} if mode.naive_trees else set()
        assert busy == {"target", "draft", "backward"} | trees | ({"paths"} if mode.naive_trees == 2 else set())


def test_looking_at_a_plan_trains_nothing_and_is_the_plan_of_the_step(llama, draft, tmp_path):
    rows = texts(1, 24)
    stepper = Stepper(trainer_of(draft, llama, rows, tmp_path), Clock(torch.device("cpu")))
    before = copy.deepcopy(draft.state_dict())
    looked = stepper.look(rows)
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    stepper.step(rows)
    assert torch.equal(looked.roots, stepper.plan.roots) and torch.equal(looked.rewards, stepper.plan.rewards)


# ---------------------------------------------------------------- rounds
@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two rows a step, two steps of all modes, and what was recalled of M0's trees."""
    target = tiny_target(sharpness=1.0)
    draft, reference = (tiny_draft(target, vocab=60, tree=TREE, seed=seed) for seed in (1, 2))
    options = {"per_device_train_batch_size": 2, "num_groups": 2, "group_size": 4, "bf16": False}
    folder = str(tmp_path_factory.mktemp("bench"))
    rows = texts(4, 26)
    steppers = make_steppers(draft, reference, target, tiny_tokenizer(), rows, folder, options)
    recalled, memory = [], steppers[KEPT].trainer.term.memory
    recall = memory.recall
    memory.recall = lambda *args: recalled.append(recall(*args)) or recalled[-1]
    found, naive = bench_train(steppers, rows, 20, rows_per_step=2, steps=2, reference_roots=3, memory=False)
    return found, naive, recalled


def test_every_mode_is_measured_on_every_round(measured):
    found, naive, _ = measured
    assert [result.mode for result in found] == list(MODES) and len(naive.rounds) == 2
    for result in found:
        assert len(result.steps) == 2 and result.length == 20 and result.rows == 2
        shares = result.shares()
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
        assert {step.trained_tokens for step in result.steps} == {36}
        assert {step.tree_roots for step in result.steps} == {2 * 2 * 4 if result.mode.naive_trees else 0}


def test_the_target_reads_less_than_naively(measured):
    by_name = {result.mode.name: result for result in measured[0]}
    assert by_name[PHASE_I].target_tokens == by_name[PHASE_I].naive_target_tokens == 20
    assert by_name[PHASE_II].naive_target_tokens == 20 + 2 * 2 * 4 * 8  # K m g for draft and reference
    assert by_name["Phase II, tree_kl"].naive_target_tokens == 20 + 2 * 4 * 8
    for result in measured[0][1:]:
        assert 20 < result.target_tokens < result.naive_target_tokens
    assert by_name[KEPT].target_tokens < by_name[PHASE_II].target_tokens


def test_kept_trees_are_read_after_a_first_pass_over_all_rows(measured):
    assert [found is not None for found in measured[2]] == [False, False, True, True, True]


def test_the_naive_loop_of_a_run_agrees_with_its_steps(measured):
    for r in measured[1].rounds:
        assert r.roots == 3 and r.step_roots == 16 and r.target_tokens == 3 * 2 * 9
        assert r.difference < 1e-5 and set(r.seconds) == {"rows", "trees", "scoring"}


def test_a_wrong_reward_would_be_seen(llama, draft, tmp_path, monkeypatch):
    from gto_hf.trainer import bench, naive

    rows = texts(1, 24)
    stepper = Stepper(trainer_of(draft, llama, rows, tmp_path), Clock(torch.device("cpu")))
    reward = naive.tree_reward
    monkeypatch.setattr(naive, "tree_reward", lambda *args: reward(*args) + 0.25)
    assert bench.time_naive(stepper, rows[:1], 3).difference == pytest.approx(0.25, abs=1e-4)


def test_a_row_without_a_group_is_named(llama, draft, tmp_path):
    from gto_hf.trainer.bench import time_naive

    rows = texts(1, 24)
    stepper = Stepper(trainer_of(draft, llama, rows, tmp_path), Clock(torch.device("cpu")))
    with pytest.raises(ValueError, match="no 3 adjacent positions"):
        time_naive(stepper, [[EOS] * 24], 3)


def test_extrapolation_and_factors_by_hand():
    from gto_hf.trainer.bench import ModeResult

    fast = ModeResult(MODES[1], 20, 2, 8)
    fast.steps = [Step(s, dict.fromkeys(PARTS, 0.0) | {"trees": 0.5, "scoring": 1.5}, 36, 16, 99) for s in (4.0, 8.0)]
    seconds = {"rows": 1.0, "trees": 1.0, "scoring": 3.0}
    naive = NaiveResult(20, 2, [NaiveRound(4, 16, seconds, d, 72) for d in (0.0, 0.5)])
    assert naive.whole() == [2 * 1 + 4 * 4.0] * 2 and naive.roots_per_second == 1.0 and naive.difference == 0.5
    trees, step = naive.factors(fast)
    assert (trees.middle, trees.low, trees.high) == (9, 9, 9)
    assert (step.middle, step.low, step.high) == ((5 + 3) / 2, 3, 5)  # (8 - 2 + 18) / 8 and (4 - 2 + 18) / 4
    base = ModeResult(MODES[0], 20, 2, 8, [Step(2.0), Step(2.0)])
    assert str(fast.over(base)) == "3.00 [2.00, 4.00]"
    assert fast.shares()["scoring"] == pytest.approx(3 / 12) and fast.shares()["other"] == pytest.approx(8 / 12)
    assert fast.trees_per_second == (2 * 16 / 4 + 2 * 16 / 8) / 2 and fast.tokens_per_second == (9 + 4.5) / 2


def test_sampled_rows_have_the_length_asked_for_and_no_end():
    target = tiny_target(sharpness=1.0)
    rows = sample_rows(target, 3, 16, torch.tensor([EOS, 5]), seed=4, batch=2)
    assert [len(row) for row in rows] == [16] * 3 and not {EOS, 5} & {i for row in rows for i in row}
    assert rows == sample_rows(target, 3, 16, torch.tensor([EOS, 5]), seed=4, batch=2)
    assert len({tuple(row) for row in rows}) == 3


# ---------------------------------------------------------------- the command
@pytest.fixture
def folders(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    for name, vocab in (("draft", 60), ("small", 40)):
        tiny_draft(target, vocab=vocab, tree=TREE).save_pretrained(tmp_path / name)
    lines = [json.dumps({"input_ids": row}) for row in texts(3, 30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def command(folders, *more):
    return ["bench", "train", "--target", str(folders / "target"), "--dtype", "float32", "--steps", "2", *more]


def test_the_command_prints_tables_and_writes_everything(folders, capsys):
    out = folders / "bench.json"
    options = ["--num-groups", "2", "--group-size", "3", "--lengths", "24", "--reference-roots", "2"]
    tree = ["--tree-depth", "2", "--tree-top-k", "3", "--tree-total-tokens", "6"]
    half = ["--dtype", "bfloat16"]  # the default
    assert main([*command(folders, *options, *tree, *half), "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    for part in (*PARTS, "other"):
        assert f"| {part} % |" in printed
    assert "× Phase I [min, max]" in printed and "What dominates it" in printed and "extrapolated linearly" in printed
    data = json.loads(out.read_text())
    assert {"machine", "threads", "torch", "transformers", "trl", "seed", "reference_roots"} <= set(data["settings"])
    assert data["settings"]["tree (root excluded)"] == {"depth": 2, "top_k": 3, "total_tokens": 6}
    modes = [(s["length"], s["mode"]["name"]) for s in data["steps"]]
    assert modes == [(24, mode.name) for mode in MODES]
    for entry in data["steps"]:
        assert len(entry["steps"]) == 2 and all(set(s["parts"]) == set(PARTS) for s in entry["steps"])
        assert sum(entry["figures"]["shares"].values()) == pytest.approx(1) and entry["peak_memory"] > 0
    assert [len(entry["rounds"]) for entry in data["naive"]] == [2]
    assert data["naive"][0]["figures"]["largest difference"] < 0.05
    assert f"| 24 | {PHASE_II} |" in printed


def test_lengths_are_sorted():
    assert bench_script.parse_lengths("512, 64,256", 8) == [64, 256, 512]


def test_rows_of_a_file_are_cut_to_length(folders):
    rows = bench_script.rows_of_file(folders / "rows.jsonl", 2, 40)
    together = [i for row in texts(3, 30) for i in row]
    assert rows == [together[:40], together[40:80]]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--lengths", "24,x"], "different numbers"),
        (["--lengths", "24,24"], "different numbers"),
        (["--lengths", "9"], "a group of 8 positions needs rows of 10 tokens"),
        (["--tree-depth", "1", "--tree-top-k", "2", "--tree-total-tokens", "5"], "can hold"),
        (["--output", "/nowhere/at/all.json"], "no folder"),
        (["--dataset", "/nowhere/rows.jsonl"], "there is no such file"),
        (["--dataset", "rows.jsonl", "--lengths", "60"], "holds 90 tokens, but 2 rows of 60"),
        (["--dataset", "bad.jsonl", "--lengths", "20"], "Row 1 of"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(folders, capsys, monkeypatch, options, words):
    (folders / "bad.jsonl").write_text('{"input_ids": [3]}\n{"text": "x"}\n')
    monkeypatch.chdir(folders)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    assert main(command(folders, *options)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gto-hf: error:") and words in error


@pytest.mark.parametrize(
    "options, words",
    [
        (["--reference", "draft"], "needs `--draft`"),
        (["--draft", "draft", "--reference", "small"], "differ in shape"),
        (["--draft-vocab-size", "9"], "more than the draft's vocabulary of 9"),
        (["--dataset", "large.jsonl", "--lengths", "20"], "token id 99, but the target has 64"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_any_work(folders, capsys, monkeypatch, options, words):
    (folders / "large.jsonl").write_text(json.dumps({"input_ids": [99] * 40}) + "\n")
    monkeypatch.chdir(folders)
    monkeypatch.setattr(bench_script, "sample_rows", lambda *a, **k: pytest.fail("sampled"))
    assert main(command(folders, *options)) == 1
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_rows_that_leave_the_targets_positions_are_refused():
    target = tiny_target("gpt2")
    with pytest.raises(ValueError, match="longest row may have 509"):
        bench_script.check_fit(target, None, None, TREE, [256, 510], 64)
    bench_script.check_fit(target, None, None, TREE, [256, 509], 64)


@pytest.mark.parametrize("option", ["--steps", "--warmup", "--rows-per-step", "--reference-roots"])
def test_counts_are_positive(folders, capsys, option):
    with pytest.raises(SystemExit):
        main(command(folders, option, "0"))
    assert "not a positive integer" in capsys.readouterr().err


def test_both_benchmarks_explain_themselves(capsys):
    for what, option in (("decode", "--trees"), ("train", "--reference-roots")):
        with pytest.raises(SystemExit) as stop:
            main(["bench", what, "--help"])
        assert stop.value.code == 0 and option in capsys.readouterr().out
