# SPDX-License-Identifier: Apache-2.0
"""
`gto-hf train`: [`GTOTrainer`] from the command line or a YAML file (`--config`). Level 6.

Fine-tune a published draft:

    gto-hf train --model_name_or_path org/draft --target_model_name_or_path org/llm --dataset_name rows.jsonl \
        --output_dir my-draft

Without `--model_name_or_path` a fresh draft is made from the target, an EAGLE-3 one unless `--draft_type` says otherwise; it needs
Phase I (`--gto_weight 0`) first. `--plan` checks and counts without weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from trl import ScriptArguments, TrlParser, get_peft_config

from gto_hf.checkpoints import AutoDraft
from gto_hf.console import EXIT_CODES, Help
from gto_hf.data import dataset_token_counts
from gto_hf.drafts import DRAFTS, DraftModel, FeatureDraft
from gto_hf.target import text_config

from .gto_config import GTOConfig
from .gto_trainer import GTOTrainer
from .load import load_target, load_tokenizer
from .model_options import ModelOptions, apply_model_options
from .plan import PlanArguments, fresh_vocab, plan_text
from .reference import warn_untrained
from .rows import MEASURED_ROWS


FRESH_TYPES = tuple(kind for kind, cls in DRAFTS.items() if issubclass(cls, FeatureDraft))


@dataclass
class DraftArguments:
    """
    Arguments of a fresh draft; not read when `--model_name_or_path` names one (but by `--plan`, if that one is not here).

    Args:
        draft_vocab_size (`int`, *optional*):
            Tokens a fresh draft can say, the most frequent ones of the training data (at most the target's vocabulary).
            Defaults to 32000, and to all where the head is the target's own.
        draft_type (`str`, *optional*, defaults to `"eagle3"`):
            `"eagle3"`, `"eagle"` (EAGLE-1/2, HASS) or `"griffin"`.
    """

    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Tokens that a fresh draft can say; default: 32000, or all of a borrowed head."},
    )
    draft_type: str = field(
        default="eagle3", metadata={"help": "Type of a fresh draft.", "choices": list(FRESH_TYPES)}
    )


def make_parser() -> TrlParser:
    """The options of `gto-hf train`."""
    return TrlParser(
        (ScriptArguments, GTOConfig, ModelOptions, DraftArguments, PlanArguments),
        prog="gto-hf train",
        description="Train a draft with GTOTrainer. Options may come from a YAML file (--config); those given here win.",
        epilog=EXIT_CODES,
        formatter_class=Help,
    )


def main(argv: list[str] | None = None) -> None:
    """Parse, train, save; pushes to the Hub with `--push_to_hub`."""
    parser = make_parser()
    script_args, args, model_args, draft_args, plan_args = _parse(parser, argv)
    name = script_args.dataset_name
    if name is None:
        parser.error("--dataset_name is needed: a Hub id, a folder, or a JSON Lines file")
    apply_model_options(model_args, script_args, args)
    if plan_args.plan:
        if args.target_model_name_or_path is None:
            parser.error("--plan needs --target_model_name_or_path")
        named, fresh = model_args.model_name_or_path, (draft_args.draft_vocab_size, draft_args.draft_type)
        adapter = get_peft_config(model_args)
        print(
            plan_text(
                args,
                args.target_model_name_or_path,
                named,
                fresh[0],
                name,
                draft_type=fresh[1],
                peft_config=adapter,
            )
        )
        return
    if name.endswith((".json", ".jsonl")) and not Path(name).is_file():
        parser.error(f"--dataset_name: there is no file {name}")
    if model_args.model_name_or_path is None and args.target_model_name_or_path is None:
        parser.error("--target_model_name_or_path is needed when no draft is named with --model_name_or_path")
    splits = _load_splits(script_args)
    wanted = [script_args.dataset_train_split]
    if args.eval_strategy != "no":
        wanted.append(script_args.dataset_test_split)
    for split in wanted:
        if split not in splits:
            raise ValueError(
                f"`{name}` has no split `{split}`, but {', '.join(splits)}. Name others with `--dataset_train_split` and "
                "`--dataset_test_split`; evaluation needs the second one (`--eval_strategy no` does without)."
            )
    train_dataset = splits[script_args.dataset_train_split]
    draft = None
    if model_args.model_name_or_path is not None:
        draft = AutoDraft.from_pretrained(model_args.model_name_or_path, **(args.model_init_kwargs or {}))
        args.model_init_kwargs = None  # they have been used; TRL would say that they are ignored
    else:
        warn_untrained(args)  # before the target is loaded
    target = load_target(None if draft is not None else args.target_model_name_or_path, draft, args)
    tokenizer = load_tokenizer(None, target, trust_remote_code=args.trust_remote_code)
    if draft is None:
        counted = train_dataset.take(MEASURED_ROWS) if script_args.dataset_streaming else train_dataset
        draft = _fresh_draft(target, tokenizer, counted, draft_args, args)
    trainer = GTOTrainer(
        model=draft,
        target_model=target,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=splits[script_args.dataset_test_split] if args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def _parse(parser: TrlParser, argv: list[str] | None) -> tuple:
    """Parsed options; what is wrong with the file after `--config` is wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[-1:] == ["--config"]:
        parser.error("--config needs a YAML file")
    try:
        return parser.parse_args_and_config(argv)
    except FileNotFoundError as error:
        parser.error(f"--config: there is no file {error.filename}")
    except yaml.YAMLError as error:
        parser.error(f"--config: this is not YAML: {' '.join(str(error).split())}")


def _load_splits(script_args: ScriptArguments) -> dict[str, Dataset | IterableDataset]:
    """
    Splits of a Hub dataset, a folder, or one file (as the train split): Parquet, CSV, or else JSON Lines.

    Raises:
        ValueError: With the reason that `datasets` hides behind "an error occurred".
    """
    name, streaming = script_args.dataset_name, script_args.dataset_streaming
    try:
        if Path(name).is_file():
            kind = {".parquet": "parquet", ".csv": "csv"}.get(Path(name).suffix, "json")
            return load_dataset(kind, data_files={script_args.dataset_train_split: name}, streaming=streaming)
        return load_dataset(name, name=script_args.dataset_config, streaming=streaming)
    except DatasetGenerationError as error:
        raise ValueError(f"`{name}` could not be read: {error.__cause__ or error}") from error


def _fresh_draft(
    target: object, tokenizer: object, dataset: Dataset | IterableDataset, draft_args: DraftArguments, args: GTOConfig
) -> DraftModel:
    """A draft shaped like the target, with the training data's most frequent tokens."""
    if args.chat_template_path is not None:  # the one that the rows will be rendered with
        tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
    vocab, kind = text_config(target).vocab_size, draft_args.draft_type
    counts = dataset_token_counts(dataset, tokenizer, vocab, text_field=args.dataset_text_field)
    size = fresh_vocab(kind, draft_args.draft_vocab_size, vocab)
    return DRAFTS[kind].from_target(target, draft_vocab_size=size, token_counts=counts, tokenizer=tokenizer)
