# SPDX-License-Identifier: Apache-2.0
"""
Chat in the terminal and see what the draft saves: drafted tokens that the target accepted are green, the target's own are blue.

    python examples/chat.py
    python examples/chat.py --target org/llm --draft org/draft --temperature 0.7

Below the answer stand the running acceptance length τ and the number of target forwards. Needs rich: pip install -e ".[draw]"
"""

import argparse
from contextlib import suppress

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from transformers.generation import BaseStreamer

from gto_hf import AutoDraft, record_rounds
from gto_hf.data import render_prompt
from gto_hf.evaluation.misalignment import accepted_columns
from gto_hf.quickstart import load_target, shipped_draft


class Colours(BaseStreamer):
    """Shows the tokens of each round as it happens; `rounds` is what `record_rounds` fills before a round is streamed."""

    def __init__(self, tokenizer: object, rounds: list, live: Live, skip: int) -> None:
        self.tokenizer, self.rounds, self.live, self.skip = tokenizer, rounds, live, skip
        self.ids, self.written, self.text = [], 0, Text()

    def put(self, value: torch.Tensor) -> None:
        new = value.flatten().tolist()[self.skip :]
        self.skip = max(0, self.skip - value.numel())  # the prompt comes first
        accepted = len(accepted_columns(self.rounds[-1])) if self.rounds else 0
        for number, token in enumerate(new):
            self.ids.append(token)
            so_far = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if so_far.endswith("\ufffd"):
                continue  # the first bytes of a character: wait for the rest
            self.text.append(so_far[self.written :], "green" if number < accepted else "bold blue")
            self.written = len(so_far)
        rounds = max(len(self.rounds), 1)
        emitted = sum(len(trace.emitted) for trace in self.rounds)
        status = f"τ {emitted / rounds:.2f} · {len(self.ids)} tokens in {len(self.rounds) + 1} target forwards"
        self.live.update(Group(self.text, Text(status, "dim")), refresh=True)

    def end(self) -> None:
        """Nothing is held back."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--draft", default=str(shipped_draft()), help="Hub id or folder")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    args = parser.parse_args(argv)
    target, tokenizer = load_target(args.target)
    draft = AutoDraft.from_pretrained(args.draft, target=target, dtype=target.dtype)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    console, messages = Console(), []
    console.print(
        "[green]accepted from the draft[/], [bold blue]the target's own[/]; an empty line or Ctrl-D ends the chat"
    )
    with suppress(EOFError, KeyboardInterrupt):
        while said := console.input("[bold]> [/]").strip():
            messages.append({"role": "user", "content": said})
            ids = torch.tensor([render_prompt(tokenizer, messages)], device=target.device)
            with record_rounds() as recorder, Live(console=console, auto_refresh=False) as live:
                streamer = Colours(tokenizer, recorder.rounds, live, ids.shape[1])
                options = {"max_new_tokens": args.max_new_tokens, "streamer": streamer, **sampling}
                target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
            messages.append({"role": "assistant", "content": streamer.text.plain})


if __name__ == "__main__":
    main()
