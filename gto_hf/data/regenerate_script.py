# SPDX-License-Identifier: Apache-2.0
"""`gto-hf regenerate`: let a target write the answers its draft is trained on. Level 4."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.target import find_device

from .answer_file import AnswerFile
from .generation import SAMPLING, check_generation, read_generation
from .local import LocalTarget
from .progress import Progress
from .prompts import OWN, read_prompts
from .regenerate import answer_locally, answer_remotely, check_counts, settings_of
from .server import ServerTarget
from .template_option import add_template_option, template_kwargs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gto-hf regenerate`."""
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--target", default=None, help="Hub id or folder of the target")
    who.add_argument("--server", default=None, help="or an OpenAI-compatible server, such as http://localhost:8000/v1")
    parser.add_argument(
        "--prompts",
        required=True,
        help="a .jsonl file with `prompt`, `turns`, `messages` or `conversations`, another file or a folder that datasets "
        f"reads, a dataset on the Hub, or {OWN} (the package's training prompts)",
    )
    parser.add_argument("--split", default="train", help="of a dataset")
    parser.add_argument("--subset", default=None, help="configuration of a dataset")
    parser.add_argument("--limit", type=int, default=None, help="answer the first prompts only")
    parser.add_argument(
        "--rewrite",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write every answer of a conversation anew; otherwise given ones are context of the last",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines file; continued if it exists")
    parser.add_argument("--answers", type=int, default=1, help="per prompt; may be raised later")
    parser.add_argument(
        "--max-new-tokens", type=int, default=None, help="longest answer; 1024 if --generation-config names no other"
    )
    parser.add_argument(
        "--temperature", type=float, default=None, help="0 is greedy; 0.7 with top-p 0.95 if nothing is given"
    )
    parser.add_argument("--top-p", type=float, default=None, help="what is not given is the target's own")
    parser.add_argument("--top-k", type=int, default=None, help="as above")
    parser.add_argument("--greedy", action="store_true", help="do not sample")
    parser.add_argument(
        "--generation-config", default=None, help="fields of a GenerationConfig: a JSON file, or JSON itself"
    )
    add_template_option(parser)
    parser.add_argument("--seed", type=int, default=0, help="an interrupted run continues with the same draws")
    local = parser.add_argument_group("with --target")
    local.add_argument("--batch-size", type=int, default=32, help="conversations at a time")
    local.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="of the weights"
    )
    local.add_argument(
        "--device", default=None, help="auto spreads over all; default: an accelerator if there is one, else the CPU"
    )
    server = parser.add_argument_group("with --server")
    server.add_argument("--model", default=None, help="name on the server, if it serves several")
    server.add_argument("--api-key-env", default=None, help="environment variable that holds the key")
    server.add_argument("--concurrency", type=int, default=16, help="conversations in flight")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for one answer")


def run(args: argparse.Namespace) -> Progress:
    """Read prompts, answer them, print what was written; returns the counts."""
    check_counts(
        answers=args.answers,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        limit=args.limit,
        concurrency=args.concurrency,
    )
    template_kwargs(args)
    fields = check_generation(generation_fields(args), args.answers)
    server = None if args.server is None else _server(args, fields)
    device = None
    if server is None:
        device = "auto" if args.device == "auto" else find_device(args.device)
    asked, skipped = read_prompts(
        args.prompts, split=args.split, subset=args.subset, limit=args.limit, rewrite=args.rewrite
    )
    print(f"{len(asked)} conversations to answer, {sum(len(each.asks) for each in asked)} turns")
    settings = settings_of(asked, fields, answers=args.answers, seed=args.seed)
    settings["chat_template_kwargs"] = args.chat_template_kwargs
    if server is not None:
        server.connect()
        settings |= {"model": server.model, "token_ids": server.gives_ids}
        with AnswerFile(args.output, settings, {"server": args.server}) as file:
            written = answer_remotely(server, asked, file, skipped, answers=args.answers, concurrency=args.concurrency)
    else:
        settings |= {"target": args.target, "dtype": args.dtype, "batch_size": args.batch_size}
        facts = {"device": str(device), "torch": torch.__version__, "transformers": transformers.__version__}
        with AnswerFile(args.output, settings, facts) as file:  # before the target is loaded
            written = answer_locally(
                _load(args, device, fields), asked, file, skipped, answers=args.answers, batch_size=args.batch_size,
                seed=args.seed,
            )  # fmt: skip
    print("\n".join(filter(None, [str(written), str(skipped), f"`{args.output}` is ready for `gto-hf train`."])))
    if server is not None and not server.gives_ids:
        print(
            "The server gives no token ids, so the rows are messages: training renders them with the chat template, which "
            "may differ from what was generated, above all in thoughts."
        )
    return written


def generation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """
    Fields of a `GenerationConfig` from the options.

    Raises:
        ValueError: If options contradict each other.
    """
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in given.items() if value is not None}
    greedy = args.greedy or given.get("temperature") == 0
    ways = {
        "--generation-config": args.generation_config is not None,
        "--greedy": args.greedy,
        "--temperature, --top-p, --top-k": bool(given),
    }
    if sum(ways.values()) > 1:
        raise ValueError(f"Give only one of {' and '.join(f'`{way}`' for way, used in ways.items() if used)}.")
    if args.generation_config is not None:
        fields = read_generation(args.generation_config)
    else:
        fields = {"do_sample": False} if greedy else given or SAMPLING
    longest = args.max_new_tokens or fields.get("max_new_tokens") or 1024
    return {**fields, "max_new_tokens": longest}


def _server(args: argparse.Namespace, fields: dict[str, Any]) -> ServerTarget:
    key = None if args.api_key_env is None else os.environ.get(args.api_key_env)
    if args.api_key_env is not None and not key:
        raise ValueError(f"`--api-key-env {args.api_key_env}`: there is no such environment variable, or it is empty.")
    return ServerTarget(
        args.server,
        fields,
        model=args.model,
        key=key,
        template_kwargs=args.chat_template_kwargs,
        seed=args.seed,
        timeout=args.timeout,
    )


def _load(args: argparse.Namespace, device: Any, fields: dict[str, Any]) -> LocalTarget:
    target = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=getattr(torch, args.dtype), device_map="auto" if device == "auto" else None
    )
    target = (target if device == "auto" else target.to(device)).eval()
    return LocalTarget(target, AutoTokenizer.from_pretrained(args.target), fields, args.chat_template_kwargs)
