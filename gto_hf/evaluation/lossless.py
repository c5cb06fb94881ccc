# SPDX-License-Identifier: Apache-2.0
"""Checks that a user can run on their own model: does a tree pass through it, and is the text what it was? Level 5."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig

from gto_hf.decoding.verifier import Verifier
from gto_hf.drafts import DraftModel
from gto_hf.target import decoding_route, layer_kinds, text_config, tree_attention, unwrap
from gto_hf.tree import DraftTree

from .layers import LayerAgreement, layer_agreement


# A gap of the two best logits below this many rounding steps of the dtype is a near-tie: forwards of different width may
# round it either way.
NEAR_TIE_STEPS = 4.0


@dataclass(frozen=True)
class Divergence:
    """
    Where a text with a draft first parts from plain `generate`.

    Attributes:
        prompt (`int`): Number of the prompt. position (`int`): Column of the first differing token.
        stock, drafted (`int`): The two tokens.
        gap (`float`): Distance of the target's two best logits there. steps (`float`): The same in rounding steps of the
            dtype at that magnitude.
    """

    prompt: int
    position: int
    stock: int
    drafted: int
    gap: float
    steps: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.steps <= NEAR_TIE_STEPS


@dataclass(frozen=True)
class LosslessReport:
    """
    Result of [`verify_lossless`].

    Attributes:
        dtype (`torch.dtype`): Of the target. prompts, identical (`int`): Texts compared, and equal ones.
        divergences (`list[Divergence]`): One for each text that differs.
        tau (`float`): Acceptance length over all prompts, bonus counted.
    """

    dtype: torch.dtype
    prompts: int
    identical: int
    divergences: list[Divergence]
    tau: float

    @property
    def ok(self) -> bool:
        """Whether all texts are equal, or differ only where rounding decides between two nearly equal tokens."""
        exact = self.dtype in (torch.float32, torch.float64)
        return all(d.near_tie and not exact for d in self.divergences)

    def __str__(self) -> str:
        lines = [
            f"{self.identical} of {self.prompts} texts identical to plain generate in {self.dtype}, tau {self.tau:.2f}"
        ]
        for d in self.divergences:
            cause = "a near-tie, rounding" if d.near_tie else "not a near-tie: a bug, please report it"
            lines.append(
                f"prompt {d.prompt}, token {d.position}: {d.drafted} instead of {d.stock}; the two best logits are "
                f"{d.gap:.3g} apart ({d.steps:.1f} rounding steps): {cause}"
            )
        return "\n".join(lines)


@torch.inference_mode()
@torch.random.fork_rng()
def verify_lossless(
    model: Any,
    draft: DraftModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    *,
    max_new_tokens: int = 64,
    **generate_kwargs: Any,
) -> LosslessReport:
    """
    Compare greedy texts with and without the draft, and explain every difference.

    Args:
        model (`PreTrainedModel`): The target. draft ([`DraftModel`]): Its draft.
        prompts (`Sequence`): Token ids, one sequence per prompt.
        max_new_tokens (`int`, *optional*, defaults to `64`): Length of the texts.
        **generate_kwargs: Passed to both `generate` calls; sampling is compared from the same seed (0).
    """
    if not isinstance(prompts, (list, tuple, torch.Tensor)) or any(len(prompt) == 0 for prompt in prompts):
        raise TypeError(
            "`prompts` are token ids, one sequence of at least one id per prompt, for example "
            "`[tokenizer(text)['input_ids'] for text in texts]`."
        )
    divergences, identical, accepted, rounds = [], 0, 0, 0
    for number, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device).reshape(1, -1)
        kwargs = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "return_dict_in_generate": True,
            **generate_kwargs,
        }
        torch.manual_seed(0)
        stock = model.generate(ids, **kwargs).sequences[0]
        torch.manual_seed(0)
        output = model.generate(ids, assistant_model=draft, **kwargs)
        drafted = output.sequences[0]
        statistics = getattr(output, "statistics", None)
        if statistics is not None:
            accepted += statistics.accepted_tokens + statistics.bonus_tokens
            rounds += statistics.rounds
        if torch.equal(stock, drafted):
            identical += 1
            continue
        length = min(len(stock), len(drafted))
        differ = (stock[:length] != drafted[:length]).nonzero()
        position = int(differ[0]) if len(differ) else length
        logits = model(stock[None, :position]).logits[0, -1].float()
        best = logits.topk(2).values
        step = float(best[0].abs()) * torch.finfo(model.dtype).eps
        gap = float(best[0] - best[1])
        first, second = (int(x[position]) if position < len(x) else -1 for x in (stock, drafted))
        divergences.append(Divergence(number, position, first, second, gap, gap / max(step, 1e-30)))
    tau = accepted / rounds if rounds else float("nan")
    return LosslessReport(model.dtype, len(prompts), identical, divergences, tau)


@dataclass
class CheckReport:
    """
    Result of [`check`].

    Attributes:
        route (`str`): `"tree"`, `"chain"` or `"refused"`.
        tree_error (`float`): Largest difference of a logit between a small tree and sequential forwards, as a share of the
            largest logit; NaN for chains.
        lossless ([`LosslessReport`], *optional*): Of the texts that were compared.
        agreement ([`LayerAgreement`], *optional*): First guesses with the features of neighbouring layers.
        lines (`list[str]`): What was found, in words. ok (`bool`): Whether the pair can be used.
    """

    route: str
    tree_error: float = float("nan")
    lossless: LosslessReport | None = None
    agreement: LayerAgreement | None = None
    lines: list[str] = field(default_factory=list)
    ok: bool = False

    def __str__(self) -> str:
        return "\n".join([*self.lines, "verdict: " + ("ready to use" if self.ok else "do not use this pair as it is")])


def check(
    model: Any,
    draft: DraftModel,
    *,
    full: bool = False,
    prompts: Sequence[Sequence[int] | torch.Tensor] | None = None,
    verbose: bool = True,
) -> CheckReport:
    """
    Test a target and a draft on this machine: a small tree against sequential forwards, one short lossless text, and
    whether the draft would guess better with the features of neighbouring layers.

    Args:
        model (`PreTrainedModel`): The target. draft ([`DraftModel`]): Its draft.
        full (`bool`, *optional*, defaults to `False`): Also run [`verify_lossless`] on `prompts`.
        prompts (`Sequence`, *optional*): Token ids of real prompts; random tokens otherwise, which say nothing about the
            acceptance length.
        verbose (`bool`, *optional*, defaults to `True`): Print the verdict.

    Returns:
        [`CheckReport`]: `str()` of it is what is printed.
    """
    report = CheckReport(route="refused")
    try:
        route = decoding_route(model)
        draft.check_target(model)
    except ValueError as error:
        report.lines.append(str(error))
    else:
        report.route = route.kind
        report.lines.append(route.reason or "route: the target checks trees")
        _check_pair(model, draft, report, full, prompts)
    if verbose:
        print(report)
    return report


def _check_pair(
    model: Any,
    draft: DraftModel,
    report: CheckReport,
    full: bool,
    prompts: Sequence[Sequence[int] | torch.Tensor] | None,
) -> None:
    """Fill a report for a pair that is not refused."""
    vocabulary, generator = text_config(model).vocab_size, torch.Generator().manual_seed(0)
    random = [torch.randint(3, max(vocabulary - 8, 4), (12,), generator=generator) for _ in range(2)]
    exact = True
    if report.route == "tree":
        report.tree_error = tree_error(model)
        limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
        exact = report.tree_error <= limit
        found = f"a small tree against sequential forwards: largest difference {report.tree_error:.1e} of the largest logit"
        report.lines.append(
            found if exact else f"{found}, more than {limit:.0e}: siblings see each other or the wrong past"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen = random if prompts is None else prompts
            short = verify_lossless(model, draft, chosen[:1], max_new_tokens=16)
            report.lossless = verify_lossless(model, draft, chosen) if full else short
        except ValueError as error:  # the model's own generation config asks for what drafts cannot do
            report.lines.append(f"`generate` refuses this pair: {error}")
            return
    report.lines.append(str(report.lossless))
    if prompts is not None and report.lossless.tau < 1.1:
        report.lines.append("the draft is hardly ever right on these prompts: is it made for this target?")
    if draft.reads_features:
        report.agreement = layer_agreement(model, draft, chosen[:4])
        report.lines.append(str(report.agreement))
    report.ok = exact and report.lossless.ok and short.ok


@torch.inference_mode()
def tree_error(model: nn.Module) -> float:
    """
    Largest difference of a logit between one forward over a small tree and one forward per path, relative to the largest.

    The tree has two children of the root and a child of the second one, below a prompt that is longer than the target's
    windows where these are at most 1,024 tokens.
    """
    model = unwrap(model)
    windows = [k.window or k.chunk for k in layer_kinds(model).values() if k.window or k.chunk]
    length = max([16, *(w + 3 for w in windows if w <= 1024)])
    generator = torch.Generator().manual_seed(1)
    vocabulary = text_config(model).vocab_size
    ids = torch.randint(3, max(vocabulary - 8, 4), (1, length + 4), generator=generator).to(model.device)
    prompt, nodes = ids[:, :length], ids[:, length:]
    kwargs: dict[str, Any] = {"cache": DynamicCache(config=model.config), "use_cache": True, "attention_mask": None}
    kwargs["position_ids"] = torch.arange(length, device=model.device)[None]
    verifier = Verifier(model, [], kwargs, GenerationConfig(disable_compile=True), chain=False, size=4)
    verifier.prefill(prompt)
    parents = torch.tensor([[0, 0, 0, 2]], device=model.device)
    depths = torch.tensor([[0, 1, 1, 2]], device=model.device)
    with tree_attention(model):
        logits, _ = verifier.verify(DraftTree(nodes, parents, depths, torch.zeros_like(nodes).float()))
    worst = scale = 0.0
    for path in ([0, 1], [0, 2, 3]):
        text = torch.cat([prompt, nodes[:, path]], dim=1)
        expected = model(text).logits[0, length:].float()
        worst = max(worst, float((logits[0, path].float() - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
    return worst / max(scale, 1e-30)
