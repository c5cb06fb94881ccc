# SPDX-License-Identifier: Apache-2.0
"""
Serve a draft with vLLM or SGLang: write it in the engine's layout, show the command, and start it if asked to.

    python examples/serve.py                                          # the draft that ships, for vLLM
    python examples/serve.py --engine sglang --target org/llm --draft org/draft --tree
    python examples/serve.py --tokens 3 --run                         # and start the engine, which must be installed

The engine need not be here to see its command. vLLM drafts chains; SGLang drafts chains, and trees with `--tree`.
"""

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from gto_hf.export import export
from gto_hf.quickstart import shipped_draft, target_source


PORTS = {"vllm": 8000, "sglang": 30000}


def installed(engine: str) -> bool:
    """Whether `--run` could start it: vLLM is a command, SGLang a module of this Python."""
    found = shutil.which(engine) if engine == "vllm" else importlib.util.find_spec(engine)
    return found is not None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*PORTS], default="vllm")
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--draft", default=str(shipped_draft()), help="Hub id or folder, in any layout")
    parser.add_argument("--output", type=Path, help="folder to write (default: runs/serve-ENGINE)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    parser.add_argument("--tokens", type=int, help="length of a chain (default: the depth of the draft's tree)")
    parser.add_argument("--tree", action="store_true", help="SGLang: the draft's own tree instead of a chain")
    parser.add_argument("--run", action="store_true", help="start the engine; it ends with Ctrl-C")
    args = parser.parse_args(argv)
    if args.tree and args.engine != "sglang":
        parser.error("--tree is for SGLang: vLLM checks one chain per round")
    if args.run and not installed(args.engine):
        parser.error(f"--run needs {args.engine} in this environment: pip install {args.engine}; or leave out --run")

    target = target_source(args.target)
    made = export(
        args.draft,
        args.output or Path(f"runs/serve-{args.engine}"),
        args.engine,
        target=target,
        tokenizer=AutoTokenizer.from_pretrained(target),
        speculative_tokens=args.tokens,
        overwrite=args.overwrite,
    )
    wanted = {"vllm": "vLLM (chain)", "sglang": "SGLang, tree" if args.tree else "SGLang, chain"}
    command = made.commands[wanted[args.engine]]
    asked = {"model": target, "messages": [{"role": "user", "content": "Write a haiku about rain."}]}
    ask = f"curl http://localhost:{PORTS[args.engine]}/v1/chat/completions -H 'Content-Type: application/json' -d "
    print("\n".join([f"wrote {made.folder}", *(f"note: {note}" for note in made.notes)]))
    print(f"\nserve it:\n  {command}\n\nand ask:\n  {ask}{shlex.quote(json.dumps(asked))}", flush=True)
    if args.run:
        words = shlex.split(command)
        python = [sys.executable] if words[0] == "python" else [words[0]]  # this environment's, whatever PATH says
        sys.exit(subprocess.run([*python, *words[1:]]).returncode)


if __name__ == "__main__":
    main()
