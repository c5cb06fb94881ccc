# SPDX-License-Identifier: Apache-2.0
"""`gto-hf train`: every option reaches the model it is for, or is refused by name."""

import json
from dataclasses import fields

import pytest
import torch
from trl import ModelConfig, ScriptArguments

from gto_hf import AutoDraft
from gto_hf.cli import main
from gto_hf.trainer import load, plan, script
from gto_hf.trainer.model_options import ModelOptions, apply_model_options
from gto_hf.trainer.script import make_parser
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows
from tests.trainer.test_quantized_targets import wide_target


OFF = [
    "--bf16",
    "False",
    "--report_to",
    "none",
    "--disable_tqdm",
    "True",
    "--save_strategy",
    "no",
    "--report",
    "False",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_draft(target).save_pretrained(folder / "draft")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, written_rows(target, 8, 24))))
    return folder


@pytest.fixture
def command(folder, tmp_path):
    """The options of a short Phase I run."""
    return [
        "train", "--target_model_name_or_path", str(folder / "target"), "--dataset_name", str(folder / "rows.jsonl"),
        "--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--gto_weight", "0", *OFF,
    ]  # fmt: skip


def applied(*argv):
    """The training arguments that a command line gives."""
    options, args, models, *_ = make_parser().parse_args_and_config(["--output_dir", "x", *argv])
    apply_model_options(models, options, args)
    return args


class _Stop(Exception):
    pass


def recorded(monkeypatch, owner, *, stop):
    """Keyword arguments, and what was loaded, of every call of `owner.from_pretrained`."""
    calls, real = [], owner.from_pretrained

    def from_pretrained(*args, **kwargs):
        calls.append([kwargs, None])
        if stop:
            raise _Stop
        calls[-1][1] = real(*args, **kwargs)
        return calls[-1][1]

    monkeypatch.setattr(owner, "from_pretrained", from_pretrained)
    return calls


def test_every_field_of_trl_has_been_decided_on():
    adapter = {name for name in ModelConfig.__dataclass_fields__ if name.startswith(("lora_", "use_"))}
    target = {
        "dtype",
        "attn_implementation",
        "load_in_8bit",
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "bnb_4bit_quant_storage",
    }
    assert {f.name for f in fields(ModelConfig)} == adapter | target | {"model_name_or_path", "model_revision"}
    data = {"name", "config", "train_split", "test_split", "streaming"}
    assert {f.name for f in fields(ScriptArguments)} == {f"dataset_{name}" for name in data} | {"ignore_bias_buffers"}
    texts = {f.name: f.metadata["help"] for f in fields(ModelOptions)}
    assert "target" in texts["load_in_4bit"] and "LoRA" not in texts["load_in_4bit"]


# ---------------------------------------------------------------- the target
def test_dtype_and_attention_are_the_targets(command, monkeypatch, capsys):
    calls = recorded(monkeypatch, load.AutoModelForCausalLM, stop=False)
    assert main([*command, "--dtype", "bfloat16", "--attn_implementation", "eager"]) == 0, capsys.readouterr().err
    ((_, target),) = calls
    assert target.dtype == torch.bfloat16 and target.config._attn_implementation == "eager"
    assert AutoDraft.from_pretrained(command[command.index("--output_dir") + 1]).dtype == torch.float32


@pytest.mark.parametrize(
    "options, expected",
    [
        (
            ["--load_in_4bit"],
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
        ),
        (
            ["--load_in_4bit", "--bnb_4bit_quant_type", "fp4", "--use_bnb_nested_quant", "--dtype", "float16"],
            {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float16"},
        ),
        (["--load_in_8bit"], {"load_in_8bit": True, "load_in_4bit": False}),
    ],
)
def test_a_target_is_quantized_as_it_is_loaded(command, options, expected, monkeypatch):
    calls = recorded(monkeypatch, load.AutoModelForCausalLM, stop=True)
    with pytest.raises(_Stop):
        main([*command, *options])
    found = calls[0][0]["quantization_config"]
    assert {name: found[name] for name in expected} == expected
    assert calls[0][0]["dtype"] == ("float16" if "float16" in options else "bfloat16")
    json.dumps(found)  # kept with the run's arguments


def test_a_target_in_4_bits_is_really_one(command, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    wide_target().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    calls = recorded(monkeypatch, load.AutoModelForCausalLM, stop=False)
    wide = ["--target_model_name_or_path", str(tmp_path / "target"), "--dtype", "float32"]
    assert main([*command, *wide, "--load_in_4bit"]) == 0
    assert calls[0][1].is_loaded_in_4bit and calls[0][1].model.layers[0].mlp.up_proj.weight.dtype == torch.uint8


def test_the_plan_knows_a_quantized_target(command, capsys):
    sizes = {}
    for options in ("", "--load_in_8bit", "--load_in_4bit"):
        assert main([*command, "--plan", "--dtype", "bfloat16", *options.split()]) == 0
        out = capsys.readouterr().out
        assert ("zero3.yaml" in out) == (not options)
    args = applied("--dataset_name", "x", "--load_in_4bit")
    config = tiny_target().config
    for options in (None, args.target_model_init_kwargs):
        args.target_model_init_kwargs = options or {"dtype": "bfloat16"}
        shape, _ = plan.draft_config(None, config, 48)
        sizes[options is None] = plan.sizes_of(config, shape, args)
    plain, packed = sizes[True], sizes[False]
    norms = sum(parameter.numel() for parameter in tiny_target().parameters() if parameter.ndim == 1)
    kept = 2 * 64 * 32 + norms  # embedding, head and norms
    assert plain.memory()["target"] == 2 * plain.target
    assert packed.memory()["target"] == int(0.5625 * (plain.target - kept)) + 2 * kept


def test_explicit_keywords_are_kept_and_may_not_disagree():
    words = '{"dtype": "float16", "device_map": "auto"}'
    args = applied("--target_model_init_kwargs", words, "--dtype", "float16")
    assert args.target_model_init_kwargs == {"dtype": "float16", "device_map": "auto"}
    packed = applied("--target_model_init_kwargs", words, "--load_in_4bit").target_model_init_kwargs
    assert packed["dtype"] == packed["quantization_config"]["bnb_4bit_compute_dtype"] == "float16"
    assert applied().target_model_init_kwargs is None and applied().model_init_kwargs is None
    with pytest.raises(ValueError, match="dtype = 'bfloat16'.*target_model_init_kwargs.*'float16'"):
        applied("--target_model_init_kwargs", words, "--dtype", "bfloat16")
    with pytest.raises(ValueError, match="revision = 'v2'.*model_init_kwargs.*'v1'"):
        applied("--model_name_or_path", "d", "--model_init_kwargs", '{"revision": "v1"}', "--model_revision", "v2")


# ---------------------------------------------------------------- the draft
def test_a_revision_is_the_drafts(command, monkeypatch):
    calls = recorded(monkeypatch, script.AutoDraft, stop=True)
    with pytest.raises(_Stop):
        main([*command, "--model_name_or_path", "org/draft", "--model_revision", "v2"])
    assert calls[0][0] == {"revision": "v2"}


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_is_trained_on(command, folder, named):
    draft = ["--model_name_or_path", str(folder / "draft")] if named else []
    assert main([*command, *draft, "--dataset_streaming"]) == 0
    report = json.loads((folder / command[command.index("--output_dir") + 1] / "data_report.json").read_text())
    assert report["train"]["read_in_training"]["rows"] > 0  # only a stream is counted as it is read


def test_a_fresh_draft_is_not_made_the_reference_in_silence(command, folder):
    phase2 = [*command, "--gto_weight", "0.5", "--num_groups", "1", "--group_size", "4"]
    with pytest.warns(UserWarning, match="Train Phase I first"):
        assert main(phase2) == 0
    # Saved without training it is no better; after Phase I it is.
    with pytest.warns(UserWarning, match="Train Phase I first"):
        assert main([*phase2, "--model_name_or_path", str(folder / "draft")]) == 0
    out = command[command.index("--output_dir") + 1]
    with pytest.warns() as caught:
        assert main([*phase2, "--model_name_or_path", out, "--output_dir", out + "2"]) == 0
    assert not [w for w in caught if "Phase I" in str(w.message)]


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "options, words",
    [
        (["--lora_r", "8", "--use_dora"], "--lora_r, --use_dora.*--use_peft"),
        (["--use_peft", "--lora_task_type", "SEQ_CLS"], "--lora_task_type"),
        (["--bnb_4bit_quant_type", "fp4"], "--bnb_4bit_quant_type.*--load_in_4bit"),
        (["--load_in_8bit", "--use_bnb_nested_quant"], "--use_bnb_nested_quant.*--load_in_4bit"),
        (["--load_in_4bit", "--dtype", "auto"], "--dtype auto"),
        (["--model_revision", "v2"], "--model_revision.*--model_name_or_path"),
        (["--model_init_kwargs", '{"revision": "v2"}'], "--model_init_kwargs.*--model_name_or_path"),
        (["--ignore_bias_buffers"], "--ignore_bias_buffers"),
        (["--dataset_config", "en", "--dataset_name", __file__], "--dataset_config.*is a file"),
        (["--dataset_streaming"], "--dataset_streaming.*--max_steps"),
        (["--eos_token", "x"], "eos_token"),
        (["--pad_token", "x"], "pad_token"),
        (["--chat_template_path", "org/tokenizer"], "chat_template_path.*jinja"),
    ],
)
def test_options_without_a_use_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        applied(*options)


def test_a_fresh_drafts_tokens_are_counted_with_the_template_of_the_run(command, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "ABC"}, {"role": "assistant", "content": "DDDDEEEEFFFF"}]}] * 4
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chats = ["--dataset_name", str(tmp_path / "chats.jsonl"), "--chat_template_path", str(tmp_path / "chat.jinja")]
    assert main([*command, *chats]) == 0  # the tokenizer itself has none
