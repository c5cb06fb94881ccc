# SPDX-License-Identifier: Apache-2.0
"""Model cards: what they claim is on disk or was measured, and their metadata is valid."""

import argparse
import copy
import json
import pickle
import re
import shlex
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from huggingface_hub import EvalResult, ModelCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from peft import LoraConfig

import gto_hf.evaluation
from gto_hf import AutoDraft, DraftConfig, GTOConfig, GTOTrainer, TreeConfig
from gto_hf.cli import main
from gto_hf.hub import clean_folder, draft_card, publishable, read_results
from gto_hf.hub.results import PLAIN
from tests.tiny import tiny_draft, tiny_tokenizer, written_rows
from tests.trainer.helpers import make


TREE, CHAIN = {"depth": 4, "top_k": 5, "total_tokens": 20}, {"depth": 4, "top_k": 1, "total_tokens": 4}


def answer(tokens, seconds, histogram=None, bonus=0):
    """An answer as `gto-hf eval` writes it."""
    statistics = None
    if histogram is not None:
        statistics = {"rounds": sum(histogram), "bonus_tokens": bonus, "accepted_histogram": histogram, "runs": 1}
    return {"tokens": list(range(tokens)), "seconds": seconds, "statistics": statistics}


def results_file(path, **changes):
    """Counts by hand: plain takes 1 s for 10 tokens, the tree half of that, the chain four fifths."""
    runs = [
        {"name": PLAIN, "temperature": 0.0, "answers": [answer(10, 1.0), answer(10, 1.0)]},
        # 1 round of 0, 1 of 1 and 2 of 3 drafted tokens; then 1 of 2
        {
            "name": "mine",
            "temperature": 0.0,
            "answers": [answer(10, 0.5, [1, 1, 0, 2], 3), answer(10, 0.5, [0, 0, 1], 1)],
        },
        {
            "name": "mine @ 4/1/4",
            "temperature": 0.0,
            "answers": [answer(10, 0.8, [2, 2], 4), answer(10, 0.8, [1, 1], 2)],
        },
        {"name": "prompt lookup", "temperature": 0.0, "answers": [answer(10, 0.1), answer(10, 0.1)]},
    ]
    settings = {
        "target": "org/llm", "dtype": "bfloat16", "trees (root excluded)": {"mine": TREE}, "questions": 2,
        "prompts hash": "abc123", "max new tokens": 10, "seed": 0, "threads": 2, "machine": "A Machine, 2 cores",
        "torch": "2.13.0", "transformers": "5.24.0", "something new": {"nobody": "knows"},
    }  # fmt: skip
    data = {"settings": settings, "runs": runs, "more": 1} | changes
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def measured(tmp_path):
    return read_results(results_file(tmp_path / "results.json"))


@pytest.fixture
def config(draft):
    draft.config.target = {**draft.config.target, "name_or_path": "org/llm", "revision": "v1"}
    return draft.config


# ---------------------------------------------------------------- results
def test_ratios_are_made_of_the_counts(measured):
    tree, chain = measured
    assert (tree.kind, tree.shape, chain.kind, chain.shape) == ("tree", "4/5/20", "chain", "4/1/4")
    assert tree.tau_micro == (7 + 2 + 4) / 5 and tree.tau_macro == ((7 + 3) / 4 + 3) / 2
    assert chain.tau_micro == 9 / 6 and tree.speedup == 2.0 and chain.speedup == 1.25
    assert tree.tokens_per_second == 20.0 and tree.prompts == 2
    assert tree.by_depth == (4 / 5, 3 / 5, 2 / 5) and sum(tree.by_depth) == pytest.approx(9 / 5)
    assert PLAIN == gto_hf.evaluation.PLAIN


def test_sums_are_read_like_answers(measured, tmp_path):
    """The other form: sums per question set, and for all of them."""
    results = [
        {
            "system": name, "temperature": 0.0, "set": part, "figures": {"made": "of them"},
            "counts": {
                "answers": 2, "tokens": 20, "seconds": seconds, "tau_sum": tau_sum, "tau_answers": tau and 2,
                "statistics": {"rounds": sum(histogram), "bonus_tokens": bonus, "accepted_histogram": histogram},
            },
        }
        for part in ("all", "math")
        for name, seconds, histogram, bonus, tau_sum, tau in (
            (PLAIN, 2.0, [], 0, 0.0, 0), ("mine", 1.0, [1, 1, 1, 2], 4, 5.5, 2), ("mine @ 4/1/4", 1.6, [3, 3], 6, 3.0, 2),
        )
    ]  # fmt: skip
    results_file(tmp_path / "results.json", results=results, runs=[])
    assert read_results(tmp_path) == measured


def test_a_real_run_of_eval_is_read(llama, draft, tmp_path):
    llama.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "tree")
    draft.tree = TreeConfig(4, 1, 4)
    draft.save_pretrained(tmp_path / "chain")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "ABCDEF"}) + "\n" + json.dumps({"prompt": "GHIJ"}))
    output = tmp_path / "out.json"
    runs = gto_hf.evaluation.script.run(_eval_arguments(tmp_path, output))
    for name, kind in (("tree", "tree"), ("chain", "chain")):
        found = read_results(output, system=name)
        assert [f.temperature for f in found] == [0.0, 1.0] and {f.kind for f in found} == {kind}
        for mine, run in zip(found, [r for r in runs if r.name == name], strict=True):
            base = next(r for r in runs if r.name == PLAIN and r.temperature == run.temperature)
            assert mine.tau_macro == pytest.approx(run.tau_macro) and mine.tau_micro == pytest.approx(run.tau_micro)
            assert mine.speedup == pytest.approx(run.speedup(base))
            assert sum(mine.by_depth) == pytest.approx(run.statistics.mean_accepted)
    with pytest.raises(ValueError, match="measured 2 drafts .tree, chain.*--system"):
        read_results(output)
    assert main(["card", f"{tmp_path}/tree", "--results", f"{output}", "--system", "chain"]) == 1
    assert not (tmp_path / "tree" / "README.md").exists()  # those are another draft's figures
    code = main(["card", f"{tmp_path}/tree", "--results", f"{output}", "--system", "tree", "--license", "mit"])
    text = (tmp_path / "tree" / "README.md").read_text()
    assert code == 0 and str(tmp_path) not in text and "A chain was not measured." in text
    assert f"| 0 | tree | 4/5/20 | {runs[1].tau_macro:.2f} |" in text


def _eval_arguments(folder, output):
    parser = argparse.ArgumentParser()
    gto_hf.evaluation.script.add_arguments(parser)
    return parser.parse_args([
        "--target", f"{folder}/target", "--draft", f"tree={folder}/tree", "--draft", f"chain={folder}/chain", "--sets",
        f"{folder}/questions.jsonl", "--temperature", "0,1", "--max-new-tokens", "8", "--dtype", "float32",
        "--output", f"{output}",
    ])  # fmt: skip


@pytest.mark.parametrize("changes, kwargs, words", [
    ({"settings": {}}, {}, "no result of `gto-hf eval --output`.*KeyError"),
    ({"runs": [{"name": "x"}]}, {}, "no result of `gto-hf eval"),
    ({}, {"target": "org/other"}, "measured with the target `org/llm`, but this draft is for `org/other`"),
    ({}, {"system": "yours"}, "no draft called `yours`; it has mine"),
    ({"runs": []}, {}, "nothing was measured"),
])  # fmt: skip
def test_files_that_say_nothing_about_this_draft_are_refused(tmp_path, changes, kwargs, words):
    with pytest.raises(ValueError, match=words):
        read_results(results_file(tmp_path / "results.json", **changes), **kwargs)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{")
    for path, words in ((tmp_path / "x.json", "no result of"), (tmp_path / "y.json", "cannot be read")):
        with pytest.raises(ValueError, match=words):
            read_results(path)


# ---------------------------------------------------------------- the card
def test_what_was_measured_is_claimed_and_nothing_else(config, measured):
    empty = draft_card(config, name="me/draft")
    assert "have not been measured" in empty.text and "| tree |" not in empty.text and empty.data.eval_results is None
    assert "model-index" not in empty.content and "τ" not in empty.text
    card = draft_card(config, name="me/draft", results=measured)
    assert "not been measured" not in card.text and "not measured" not in card.text
    assert "| 0 | tree | 4/5/20 | 2.75 | 2.60 | 2.00 | 20.0 | 2 |" in card.text
    assert "| 0 | chain | 4/1/4 | 1.50 | 1.50 | 1.25 | 12.5 | 2 |" in card.text
    assert (
        "--- |\n| 0 | tree | 4/5/20 | 80 % | 60 % | 40 % |\n| 0 | chain | 4/1/4 | 50 % | 0 % | 0 % |\n\n" in card.text
    )
    assert "- prompts hash: abc123" in card.text and "- machine: A Machine, 2 cores" in card.text
    assert "prompt lookup" not in card.text
    only_chain = draft_card(config, name="me/draft", results=measured[1:])
    assert "A tree was not measured." in only_chain.text


def test_the_metadata_is_valid_and_survives_a_round_trip(config, measured, tmp_path):
    card = draft_card(config, name="me/draft", results=measured, license="mit", dataset_name="org/rows")
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert (
        again.data.base_model == "org/llm"
        and again.data.to_dict()["library_name"] == "gto-hf"
        and again.data.license == "mit"
    )
    assert again.data.datasets == "org/rows" and "speculative-decoding" in again.data.tags
    results = again.data.eval_results
    assert len(results) == 4 and all(isinstance(r, EvalResult) for r in results)
    assert [(r.metric_type, r.metric_value) for r in results] == [
        ("acceptance_length", 2.75), ("speedup", 2.0), ("acceptance_length", 1.5), ("speedup", 1.25),
    ]  # fmt: skip
    assert results[0].metric_args == {"temperature": 0.0, "tree": TREE}
    index = metadata_load(tmp_path / "README.md")["model-index"]
    name, same = model_index_to_eval_results(index)
    assert name == "me/draft" and same == results and eval_results_to_model_index(name, same) == index


def test_the_serving_commands_are_those_of_this_tree(config):
    text = draft_card(config, name="me/draft").text
    (spec,) = {json.dumps(json.loads(s)) for s in re.findall(r"--speculative-config '([^']+)'", text)}
    assert json.loads(spec) == {"method": "eagle3", "model": "draft-vllm", "num_speculative_tokens": 4}
    commands = re.findall(r"```bash\n(gto-hf export.*?)```", text, re.DOTALL)[0]
    words = shlex.split(commands.replace("\\\n", " "))
    for option, value in (
        ("--speculative-num-steps", "4"), ("--speculative-eagle-topk", "5"), ("--speculative-num-draft-tokens", "21"),
        ("--model-path", "org/llm"),
    ):  # fmt: skip
        assert words[words.index(option) + 1] == value
    # Without the target an export keeps the draft's positions, and engines stop there.
    assert text.count("--target org/llm --output draft-") == 2 == text.count("gto-hf export me/draft --to ")
    assert "trl vllm-serve --model org/llm" in text
    assert "which were not measured here" in text


@pytest.mark.parametrize(
    "fields, there, gone",
    [
        ({"norm_before_residual": True}, "vllm", "SGLang"),
        ({"fc_bias": True}, None, ""),
        ({"draft_type": "eagle", "feature_layers": [8], "draft_vocab_size": 64, "fc_bias": True}, "sglang", "vLLM"),
    ],
)
def test_only_engines_that_can_load_the_draft_are_named(config, fields, there, gone):
    text = draft_card(DraftConfig(**{**config.to_dict(), **fields}), name="me/draft").text
    engines = re.findall(r"gto-hf export me/draft --to (\w+)", text)
    assert engines == ([there] if there else []) and ("Servers read" in text) == (there is not None)
    assert not there or f"{gone} cannot load this draft." in text


def test_tags_are_those_of_the_draft_type(config):
    griffin = DraftConfig(**{**config.to_dict(), "draft_type": "griffin", "feature_layers": [8]})
    for given in (None, GTOTrainer._tag_names, ["mine"]):
        for each, own, other in ((config, "eagle-3", "griffin"), (griffin, "griffin", "eagle-3")):
            tags = draft_card(each, name="me/draft", tags=given).data.tags
            assert own in tags and other not in tags and set(given or []) <= set(tags)


def test_a_depth_that_a_tree_does_not_have_is_blank(config, tmp_path):
    name = "mine @ 2/1/2"
    runs = json.loads(results_file(tmp_path / "x.json").read_text())["runs"]
    runs[2] = {"name": name, "temperature": 0.0, "answers": [answer(10, 0.8, [2, 2], 4)] * 2}
    card = draft_card(config, name="me/draft", results=read_results(results_file(tmp_path / "x.json", runs=runs)))
    assert "| 0 | chain | 2/1/2 | 50 % | 0 % | |\n" in card.text


def test_the_usage_code_compiles(config):
    for kwargs in ({}, {"adapter": True}):
        (code,) = re.findall(r"```python\n(.*?)```", draft_card(config, name="me/draft", **kwargs).text, re.DOTALL)
        compile(code, "card", "exec")


def test_paths_are_not_shown(config, measured, tmp_path):
    config.target["name_or_path"] = None
    secret = [replace(m, settings={**m.settings, "target": str(tmp_path), "machine": "/a/path"}) for m in measured]
    card = draft_card(
        config, name=f"{tmp_path}/draft", results=secret, dataset_name=f"{tmp_path}/rows.jsonl",
        training={"base_draft": f"{tmp_path}/base", "dataset": f"{tmp_path}/x"},
    )  # fmt: skip
    assert str(tmp_path) not in card.content and "/a/path" not in card.content
    assert card.data.datasets is None and card.data.base_model is None


# ---------------------------------------------------------------- the trainer's
def test_the_trainers_card_says_what_the_run_was(llama, tmp_path):
    tiny_draft(llama).save_pretrained(tmp_path / "start")
    rows = written_rows(llama, 6, 20)
    trainer = make(
        str(tmp_path / "start"), llama, rows, tmp_path / "out", max_steps=2, per_device_train_batch_size=2,
        eval_rows=Dataset.from_list(rows), eval_strategy="steps", eval_steps=2, eval_prompts=2,
        eval_max_new_tokens=8, logging_steps=500,
    )  # fmt: skip
    trainer.train()
    trainer.create_model_card(dataset_name="org/rows")
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert summary["steps"] == 2 and summary["rows"] == 6 and summary["dataset"] == "org/rows"
    assert summary["tokens read (prompts included)"] == 2 * 2 * 20
    assert summary["trained tokens"] == 2 * 2 * 16 and summary["base_draft"] is None
    measured = summary["evaluation"]["metrics"]
    assert {"eval_tau", "eval_tau_chain", "eval_accepted/depth_1"} <= set(measured)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| trained tokens | 64 |" in text and f"`eval_tau` {measured['eval_tau']:.3f}" in text
    assert "gto_weight 0.5" in text and "2509.22134" in text and str(tmp_path) not in text
    trainer.save_model()
    main(["card", f"{tmp_path}/out", "--name", "me/out"])  # the same, from what is on disk
    assert (tmp_path / "out" / "README.md").read_text().replace("me/out", "out").split("# out")[1] == text.split(
        "# out"
    )[1]


def test_the_evaluation_on_the_card_is_that_of_the_weights(llama, tmp_path):
    rows = written_rows(llama, 6, 20)
    trainer = make(
        tiny_draft(llama), llama, rows, tmp_path, max_steps=2, eval_rows=Dataset.from_list(rows), eval_strategy="steps",
        eval_steps=1, eval_prompts=2, eval_max_new_tokens=8, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="step", greater_is_better=False,
    )  # fmt: skip
    measure = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: measure() | {"eval_step": trainer.state.global_step}
    trainer.train()
    trainer.create_model_card()
    summary = json.loads((tmp_path / "training_summary.json").read_text())
    assert (summary["steps"], summary["weights of step"], summary["evaluation"]["step"]) == (2, 1, 1)
    assert "| weights of step | 1 |" in (tmp_path / "README.md").read_text()
    early = json.loads((tmp_path / "checkpoint-1" / "training_summary.json").read_text())
    assert (early["steps"], early["weights of step"]) == (1, None)


def test_an_adapters_card_names_its_base(llama, tmp_path):
    tiny_draft(llama).save_pretrained(tmp_path / "base")
    loaded = AutoDraft.from_pretrained(tmp_path / "base")
    trainer = make(
        loaded, llama, written_rows(llama, 4, 20), tmp_path / "out", max_steps=1, peft_config=LoraConfig(r=2)
    )
    trainer.train()
    trainer.save_model()
    assert main(["card", f"{tmp_path}/out", "--overwrite"]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (
        card.data.to_dict()["library_name"] == "peft"
        and 'base="path/to/base-draft"' in card.text
        and "export" not in card.text
    )
    assert "type LORA, r 2" in card.text


# ---------------------------------------------------------------- the command
def test_the_command_refuses_before_it_works(draft, tmp_path, capsys):
    draft.save_pretrained(tmp_path / "draft")
    folder = f"{tmp_path}/draft"
    (tmp_path / "draft" / "README.md").write_text("# by hand")
    for arguments, words in (
        ([folder], "was not written by gto-hf"),
        ([folder, "--output", f"{tmp_path}/no/where.md"], "there is no folder"),
        (["org/draft"], "is on the Hub: say where"),
        ([folder, "--output", f"{tmp_path}/x.md", "--target", f"{tmp_path}/llm"], "is no Hub id"),
        ([folder, "--output", f"{tmp_path}/x.md", "--push"], "needs the Hub id"),
        ([folder, "--output", f"{tmp_path}/x.md", "--training", f"{tmp_path}/no.json"], "cannot be read"),
        ([folder, "--output", f"{tmp_path}/x.md", "--results", f"{tmp_path}/no.json"], "cannot be read"),
    ):
        assert main(["card", *arguments]) == 1
        assert words in capsys.readouterr().err
    assert (tmp_path / "draft" / "README.md").read_text() == "# by hand" and not (tmp_path / "x.md").exists()
    assert main(["card", folder, "--overwrite"]) == 0 == main(["card", folder])  # its own it replaces


# ---------------------------------------------------------------- what leaves the machine
def test_pickles_of_the_config_hold_no_path_and_no_token_and_copies_hold_both(tmp_path):
    token = "hf_" + "a1B2" * 8
    args = GTOConfig(
        str(tmp_path / "out"), hub_token=token, target_model_init_kwargs={"token": token, "dtype": "bfloat16"},
        features_path=None, reference_path=str(tmp_path / "trees"), target_model_name_or_path=str(tmp_path / "llm"),
        report_to="none",
    )  # fmt: skip
    text = args.to_json_string()  # TensorBoard's files are pushed with the run
    assert token not in text and str(tmp_path) not in text and json.loads(text)["output_dir"] == "out"
    content = pickle.dumps(args)
    assert token.encode() not in content and str(tmp_path).encode() not in content
    again = pickle.loads(content)
    assert (again.output_dir, again.reference_path, again.target_model_name_or_path) == ("out", "trees", "llm")
    assert (
        again.target_model_init_kwargs == {"token": None, "dtype": "bfloat16"}
        and again.learning_rate == args.learning_rate
    )
    for same in (copy.copy(args), copy.deepcopy(args)):
        assert same.output_dir == args.output_dir and same.hub_token == token
        assert same.target_model_init_kwargs == args.target_model_init_kwargs
    torch.save(args, tmp_path / "training_args.bin")
    assert str(tmp_path).encode() not in (tmp_path / "training_args.bin").read_bytes()


def test_publishable_looks_into_plain_values():
    home = ["/home/me/x", ("~/y", 3), {"a": "C:\\me\\z", "token": "secret"}, "a/b", "./c", None, 1.5, True]
    assert publishable(home) == ["x", ("y", 3), {"a": "z", "token": None}, "a/b", "./c", None, 1.5, True]
    assert publishable("read hf_abcdefghijklmnopqrst") is None and publishable("hf_short") == "hf_short"


def test_special_tokens_that_look_like_paths_stay(tmp_path):
    values = {"eos_token": "/think", "name_or_path": "/home/me/llm", "lm": {"_name_or_path": "/home/me/small"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    clean_folder(tmp_path)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert found == {"eos_token": "/think", "name_or_path": "llm", "lm": {"_name_or_path": "small"}}
