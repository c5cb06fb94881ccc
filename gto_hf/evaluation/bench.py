# SPDX-License-Identifier: Apache-2.0
"""
`gto-hf bench decode`: ways of decoding one target, prompt by prompt in one process, and where their time goes. Level 5.

Every prompt is answered by every system before the next one, in rotating order, so that a busy moment of the machine hits
all of them. Ratios are paired: of the same prompt's tokens per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from gto_hf.decoding import RoundTimes, record_rounds
from gto_hf.drafts import DraftModel
from gto_hf.tree import TreeConfig

from .runs import PLAIN, PromptRun, SystemRun, answer
from .warmup import WarmUp


AUTO = "auto tree"


@dataclass(frozen=True)
class System:
    """
    One way of decoding.

    Attributes:
        name (`str`): As in the table. kwargs (`dict`): More arguments for `generate`.
        tree ([`TreeConfig`], *optional*): Set on the draft before every call; None for systems without our draft.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tree: TreeConfig | None = None

    @property
    def automatic(self) -> bool:
        """Whether every round chooses its own tree, by costs that are measured here."""
        tree = self.tree or getattr(self.kwargs.get("assistant_model"), "tree", None)
        return bool(getattr(tree, "auto", False))


@dataclass
class Answer(PromptRun):
    """
    One answer and where its time went.

    Attributes:
        times (`list[RoundTimes]`): Of its rounds; empty for other systems than ours.
    """

    times: list[RoundTimes] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.tokens) / self.seconds


@dataclass
class SystemResult(SystemRun):
    """
    All answers of one system, in prompt order.

    Attributes:
        peak_memory (`int`): Peak of extra memory in bytes on one prompt; 0 if not measured.
    """

    answers: list[Answer] = field(default_factory=list)
    peak_memory: int = 0

    def milliseconds(self, part: str) -> float:
        """Median over rounds of what `target`, `draft`, `processors`, `host` or `total` took; NaN without recorded rounds."""
        times = [t for a in self.answers for t in a.times]
        return 1000 * statistics.median(getattr(t, part) for t in times) if times else float("nan")

    def part(self, which: list[int]) -> SystemResult:
        """The answers to some of the prompts."""
        return replace(self, answers=[self.answers[index] for index in which])

    @property
    def nodes(self) -> float:
        """Mean nodes per round."""
        times = [t for a in self.answers for t in a.times]
        return sum(t.nodes for t in times) / len(times) if times else float("nan")


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over prompts of a paired ratio of tokens per second, with its 95 % interval (normal, on logs)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(system: SystemResult, base: SystemResult) -> Ratio:
    """Speed of `system` over `base`, prompt by prompt."""
    logs = [math.log(a.rate / b.rate) for a, b in zip(system.answers, base.answers, strict=True)]
    mean = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else float("nan")
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def default_systems(
    draft: DraftModel, trees: list[TreeConfig], *, assistant: Any = None, early_exit: int | None = None
) -> list[System]:
    """Plain generation, prompt lookup, stock assistance if there is an assistant, the draft's chain, trees, auto tree."""
    drafted = {"assistant_model": draft}
    depth = max(tree.depth for tree in trees)
    systems = [System(PLAIN), System("prompt lookup", {"prompt_lookup_num_tokens": 10})]
    if assistant is not None:
        systems.append(System("stock chain assistance", {"assistant_model": assistant}))
    if early_exit is not None:
        systems.append(System(f"stock early exit at {early_exit}", {"assistant_early_exit": early_exit}))
    systems.append(System(f"draft, chain of {depth}", drafted, TreeConfig(depth, 1, depth)))
    for tree in trees:
        systems.append(System(f"draft, tree {tree.depth}/{tree.top_k}/{tree.total_tokens}", drafted, tree))
    largest = max(trees, key=lambda tree: tree.total_tokens)
    auto = TreeConfig(depth, max(tree.top_k for tree in trees), largest.total_tokens, auto=True)
    return [*systems, System(AUTO, drafted, auto)]


def run_system(
    target: Any,
    draft: DraftModel,
    system: System,
    prompt: list[int],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> Answer:
    """One timed `generate` call; the draft's own tree is restored afterwards."""
    before = draft.tree
    if system.tree is not None:
        draft.tree = system.tree
    try:
        with record_rounds(trees=False, seconds=True) as recorder:
            run = answer(
                target, prompt, temperature=temperature, max_new_tokens=new_tokens, seed=seed, **system.kwargs
            )
    finally:
        draft.tree = before
    return Answer(run.tokens, run.seconds, run.statistics, recorder.times)


def bench_decode(
    target: Any,
    draft: DraftModel,
    systems: list[System],
    prompts: list[list[int]],
    *,
    new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    memory: bool = True,
) -> list[SystemResult]:
    """
    Answer every prompt with every system.

    Args:
        target (`PreTrainedModel`), draft ([`DraftModel`]): The pair.
        systems (`list[System]`): The first one is what the others are compared with.
        prompts (`list[list[int]]`): Token ids.
        new_tokens (`int`, *optional*, defaults to `64`): Longest answer.
        temperature (`float`, *optional*, defaults to `0.0`): 0 is greedy.
        seed (`int`, *optional*, defaults to `0`): Prompt `i` is sampled with `seed + i` by every system.
        memory (`bool`, *optional*, defaults to `True`): Measure the peak memory on the first prompt, apart from the timing.
    """
    options = {"new_tokens": new_tokens, "temperature": temperature}
    results = {system.name: SystemResult(system.name, temperature) for system in systems}
    warm_up = WarmUp(lambda system, prompt: run_system(target, draft, system, prompt, seed=seed, **options))
    with tqdm(total=len(prompts) * len(systems), desc="bench") as bar:
        for number, prompt in enumerate(prompts):
            warm_up(systems, prompt)
            turn = number % len(systems)
            for system in [*systems[turn:], *systems[:turn]]:
                made = run_system(target, draft, system, prompt, seed=seed + number, **options)
                results[system.name].answers.append(made)
                bar.update()
    if memory:
        for system in systems:
            results[system.name].peak_memory = peak_memory(
                lambda s=system: run_system(target, draft, s, prompts[0], seed=seed, **options), target.device
            )
    return list(results.values())


def peak_memory(action: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes that `action` allocates for tensors on top of what is there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def bench_table(results: list[SystemResult]) -> str:
    """The results as Markdown; times are medians over rounds, in milliseconds."""
    plain = results[0]
    head = (
        "| system | tokens/s | SR [95 %] | τ macro | τ micro | nodes | ms/round | target | draft | processors | host | host % |"
        " peak MB |"
    )
    lines = [head, "|" + "---|" * 13]
    for result in results:
        ms = {part: result.milliseconds(part) for part in ("total", "target", "draft", "processors", "host")}
        cells = [result.name, f"{result.tokens_per_second:.1f}", str(paired_ratio(result, plain))]
        cells += [f"{result.tau_macro:.2f}", f"{result.tau_micro:.2f}", f"{result.nodes:.0f}"]
        cells += [f"{ms[part]:.1f}" for part in ("total", "target", "draft", "processors", "host")]
        cells += [
            f"{100 * ms['host'] / ms['total']:.0f}",
            f"{result.peak_memory / 2**20:.0f}" if result.peak_memory else "-",
        ]
        lines.append("| " + " | ".join("-" if cell == "nan" else cell for cell in cells) + " |")
    return "\n".join(lines)


def sets_table(results: list[SystemResult], sets: list[str]) -> str:
    """
    Speed-up and macro τ of every system on each prompt set, as Markdown.

    Args:
        results (`list[SystemResult]`): The first one is plain generation. sets (`list[str]`): Set of each prompt, in order.
    """
    names = list(dict.fromkeys(sets))
    lines = ["| system | " + " | ".join(f"{name}: SR, τ" for name in names) + " |", "|" + "---|" * (len(names) + 1)]
    for result in results:
        cells = []
        for name in names:
            which = [index for index, each in enumerate(sets) if each == name]
            some = result.part(which)
            tau = "-" if math.isnan(some.tau_macro) else f"{some.tau_macro:.2f}"
            cells.append(f"{paired_ratio(some, results[0].part(which)).mean:.2f}, {tau}")
        lines.append(f"| {result.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def limits_line(result: SystemResult, plain: SystemResult) -> str:
    """In plain words, what keeps a system from being faster."""
    step = 1000 * sum(a.seconds for a in plain.answers) / max(sum(len(a.tokens) for a in plain.answers), 1)
    total, tau = result.milliseconds("total"), result.tau_micro
    if math.isnan(total):
        return f"{result.name}: every answer ended within the prefill, so no round was timed."
    parts = {
        "the larger target forward": result.milliseconds("target") - step,
        "the draft": result.milliseconds("draft"),
        "logits processors": result.milliseconds("processors"),
        "host work": result.milliseconds("host"),
    }
    largest = max(parts, key=parts.get)
    line = (
        f"{result.name}: a round costs {total / step:.2f} plain tokens ({total:.1f} ms, a plain token {step:.1f} ms) and emits "
        f"{tau:.2f}; what it costs beyond one plain token is mostly {largest} ({parts[largest]:.1f} ms)."
    )
    if tau < total / step:
        return line + " It is slower than plain generate because too few drafted tokens are accepted for that cost."
    if tau < 2:
        return line + " What limits it is the draft's acceptance."
    return line


def as_json(results: list[SystemResult], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    return {"settings": settings, "systems": [asdict(result) for result in results]}
