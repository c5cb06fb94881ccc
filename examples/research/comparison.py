# SPDX-License-Identifier: Apache-2.0
"""
Does Group Tree Optimization beat simply training longer? One command, one real model, honest controls.

    python examples/research/comparison.py                                     # the package's own answers and questions
    python examples/research/comparison.py --train rows.jsonl --held held.jsonl --questions mt_bench.jsonl humaneval.jsonl gsm8k.jsonl
    python examples/research/comparison.py --variants gto gto-mean gto-no-debias --seeds 1        # ablations
    python examples/research/comparison.py --start gto_hf/assets/draft                            # Phase I goes on from a trained draft
    python examples/research/comparison.py --steps 150 --rates 3e-4                               # longer, without a search of rates
    python examples/research/comparison.py --inits                                                # what a fresh draft should start from

Phase I trains a draft; from there every variant starts with the same weights and sees the same rows in the same order, with the
learning rate that served it best on held-out rows. The control trains the token loss on, once for the same number of steps
and once for the same time. Every stage is skipped if its result is there and resumed if it was interrupted, so the
command can be killed and repeated; a folder with results of other rows, questions or settings is refused.

Acceptance is that of decoding: the target's answers are written once, greedily and sampled, and each draft is measured on them
(see `gto_hf/evaluation/replay.py`). Speed is measured apart from this, with `gto-hf eval`.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import TrainerCallback

from gto_hf import AutoDraft, Eagle3Draft, GTOConfig, GTOTrainer, TreeConfig, count_tokens
from gto_hf.data import hold_out, load_jsonl, render_prompt
from gto_hf.evaluation import Text, load_questions, prompts_hash, read_texts, replay, spread
from gto_hf.quickstart import Budget, load_rows, load_target
from gto_hf.target import text_config, weights_hash
from gto_hf.trainer.resume import checkpoints, problem


# ---------------------------------------------------------------- the budget, fixed before the first run
TREE = TreeConfig(depth=5, top_k=6, total_tokens=20)
DRAFT_VOCAB = 8192
MAX_LENGTH = 512
ROWS = 8  # per step
TTT_STEPS = 3
PHASE1 = {"num_train_epochs": 1.5, "learning_rate": 2e-3, "warmup_steps": 40}
CONTINUE = {"max_steps": 400, "learning_rate": 1e-3, "warmup_steps": 20}  # Phase I of a draft that is trained already
STEPS = 60  # of every variant
TUNING_STEPS = 20  # of every learning rate that is tried
RATES = (1e-4, 4e-4)
SEEDS = (1, 2, 3)
QUESTIONS = 20  # per set, first turns
NEW_TOKENS = 128
HELD_ROWS = 60
INIT_STEPS = 80  # of drafts that start from copies of the target or from nothing

TREES = {"num_groups": 4, "group_size": 8}
FEWER = {"num_groups": 2, "group_size": 8}  # about as many trees per token as the paper's 16 groups on rows of 2,048
VARIANTS = {
    "control": {"gto_weight": 0.0},
    "gto": {**TREES, "gto_weight": 0.5},
    "tree_kl": {**FEWER, "gto_weight": 1.0, "gto_objective": "tree_kl"},
    "membership": {**FEWER, "gto_weight": 1.0, "gto_objective": "membership"},
    "lk_hybrid": {"gto_weight": 0.0, "token_objective": "lk_hybrid"},
    "dpace": {"gto_weight": 0.0, "ttt_weights": "dpace"},
    # ablations, one option away from the first
    "gto-K2": {**FEWER, "gto_weight": 0.5},
    "gto-max": {**FEWER, "gto_aggregation": "max"},
    "gto-mean": {**FEWER, "gto_aggregation": "mean"},
    "gto-nodes": {**FEWER, "gto_aggregation": "nodes"},
    "gto-eta3": {**FEWER, "gto_eta": 3.0},
    "gto-no-debias": {**FEWER, "gto_debias": False},
    "gto-eps0.1": {**FEWER, "gto_epsilon": 0.1},
    "gto-w0.1": {**FEWER, "gto_weight": 0.1},
    "gto-w2": {**FEWER, "gto_weight": 2.0},
    "gto-m1": {"num_groups": 16, "group_size": 1},
    "gto-m4": {"num_groups": 4, "group_size": 4},
    "gto-m16": {"num_groups": 1, "group_size": 16},
    "gto-K1": {"num_groups": 1, "group_size": 8},
    "gto-tree8": {**FEWER, "tree_depth": 3, "tree_top_k": 4, "tree_total_tokens": 8},
}
MAIN = ("control", "gto", "tree_kl", "membership")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="rows with input_ids and labels (default: the quickstart's)")
    parser.add_argument(
        "--held", type=Path, help="held-out rows for tuning (default: a tenth of the training prompts)"
    )
    parser.add_argument("--questions", nargs="+", default=["chat", "code", "math"], help="sets or JSON Lines files")
    parser.add_argument("--output", type=Path, help="default: runs/comparison, with --smoke runs/comparison-smoke")
    parser.add_argument("--start", type=Path, help="a trained draft that Phase I continues (default: a fresh one)")
    parser.add_argument(
        "--phase1-steps", type=int, help="steps of Phase I (default: 1.5 epochs, 400 with `--start`); 0: none"
    )
    parser.add_argument(
        "--ttt-steps", type=int, default=TTT_STEPS, help="unrolled steps of the token loss, of every run"
    )
    parser.add_argument("--variants", nargs="+", default=list(MAIN), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of every variant")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from")
    parser.add_argument("--no-same-time", action="store_true", help="only the control of the same number of steps")
    parser.add_argument("--inits", action="store_true", help="compare how fresh drafts start, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="a tiny budget: does everything run?")
    args = parser.parse_args()
    if args.output is None:
        args.output = Path("runs/comparison-smoke" if args.smoke else "runs/comparison")
    if args.smoke:
        shrink(args)
    Comparison(args).run()


def shrink(args: argparse.Namespace) -> None:
    """A budget of about a minute; its figures mean nothing."""
    args.steps, args.rates, args.seeds = 2, (1e-4,), 1
    globals().update(
        PHASE1={**PHASE1, "max_steps": 3},
        CONTINUE={**CONTINUE, "max_steps": 3},
        STEPS=2,
        TUNING_STEPS=1,
        SEEDS=(1,),
        INIT_STEPS=2,
    )
    globals().update(QUESTIONS=1, NEW_TOKENS=12, HELD_ROWS=2, DRAFT_VOCAB=1024)


class Comparison:
    """The stages, in order; each leaves a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.output = args, args.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.target, self.tokenizer = load_target()
        if args.train is None:
            rows = load_rows(self.target, self.tokenizer, Budget(), None)
            self.rows, self.held = hold_out(rows, 0.1)
        else:
            self.rows, self.held = load_jsonl(args.train), load_jsonl(args.held) if args.held else None
        if self.held is None:
            self.rows, self.held = hold_out(self.rows, 0.1)

        self.hashed = digest(self.rows)
        self.asked = [q for name in args.questions for q in spread(load_questions(name), QUESTIONS)]
        facts = {"tree": TREE.to_dict(), "new tokens": NEW_TOKENS, "questions": prompts_hash(self.asked)}
        facts |= {"held": digest(spread(self.held, HELD_ROWS)), "target": weights_hash(self.target)}
        same_as_before(self.output / "facts.json", facts, bool(list(self.output.glob("*/log.json"))))

        # What tuning sees is the end of held-out rows, as the target wrote it.
        tuning = spread(self.held, HELD_ROWS)
        self.tuning_texts = [Text(row["input_ids"], first_trained(row)) for row in tuning]

    def run(self) -> None:
        """Everything that is not there yet, then the table."""
        if self.args.inits:
            return self.inits()
        phase1 = self.phase1()
        self.questions = self.answers()
        results = {"phase1": [self.measure(phase1)]}
        for name in self.args.variants:
            rate = self.tuned_rate(name, phase1)
            seconds = 0.0
            for seed in SEEDS[: self.args.seeds]:
                folder = self.folder(name, seed)
                options = {**VARIANTS[name], **self.cheaper(name)}
                self.train(phase1, folder, seed=seed, max_steps=self.args.steps, learning_rate=rate, **options)
                if not self.args.no_same_time:
                    seconds = max(seconds, spent(folder))
                results.setdefault(name, []).append(self.measure(folder))
            if name != "control" and "control" in self.args.variants and not self.args.no_same_time:
                self.same_time(name, phase1, seconds, results)
        report = table(results, self.args, self.output)
        (self.output / "report.md").write_text(report, encoding="utf-8")
        (self.output / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(report)

    # ------------------------------------------------------------ training
    def phase1(self) -> Path:
        """The draft that everything starts from; later epochs read the target's features from disk."""
        folder = self.output / "phase1"
        if self.args.start is None:
            start, options = self.fresh(), PHASE1
        else:
            start, options = AutoDraft.from_pretrained(self.args.start, dtype=torch.float32), CONTINUE
        if self.args.phase1_steps == 0:
            same_as_before(folder / "facts.json", {"draft": weights_hash(start)}, folder.exists())
            start.save_pretrained(folder)
            return folder
        if self.args.phase1_steps is not None:
            warmup = min(options["warmup_steps"], self.args.phase1_steps // 5)
            options = {**options, "max_steps": self.args.phase1_steps, "warmup_steps": warmup}
        # Another order than a fresh draft's: what it saw last comes at other times.
        self.train(start, folder, seed=0 if self.args.start is None else 100, **options, **self.cached)
        return folder

    @property
    def cached(self) -> dict:
        """Options of runs that read the target's features from disk."""
        return {"gto_weight": 0.0, "features_path": str(self.output / "features")}

    def cheaper(self, name: str) -> dict:
        """Features from disk for variants without trees, unless the time of their steps is asked for."""
        return self.cached if self.args.no_same_time and VARIANTS[name].get("gto_weight") == 0 else {}

    def inits(self) -> None:
        """Short runs of Phase I from different starts."""
        for init in ("target", "head", "random"):
            folder = self.output / "inits" / init
            options = {**PHASE1, "max_steps": INIT_STEPS}
            self.train(self.fresh(init), folder, seed=0, **options, **self.cached)
            found = everywhere(self.measure(folder, self.tuning_texts, "tuning"), "all")
            print(f"init={init}: {found:.4f} tokens per round on held-out rows after {INIT_STEPS} steps")

    def fresh(self, init: str = "target") -> Eagle3Draft:
        """A draft that has seen nothing."""
        vocab = text_config(self.target).vocab_size
        torch.manual_seed(0)
        return Eagle3Draft.from_target(
            self.target,
            draft_vocab_size=min(DRAFT_VOCAB, vocab),
            token_counts=count_tokens((row["input_ids"] for row in self.rows), vocab),
            tokenizer=self.tokenizer,
            tree=TREE,
            init=init,
        )

    def folder(self, name: str, seed: int, steps: int | None = None) -> Path:
        """Of a variant's run; other lengths and a rate that was not searched for are named."""
        rate = f"-{self.args.rates[0]:g}" if len(self.args.rates) == 1 and not self.args.smoke else ""
        length = "" if steps is None and self.args.steps == STEPS else f"-{steps or self.args.steps}-steps"
        return self.output / f"{name}{length}{rate}-seed{seed}"

    def tuned_rate(self, name: str, phase1: Path) -> float:
        """The learning rate of a variant: best acceptance on held-out rows after a short run. Ablations take GTO's."""
        if len(self.args.rates) == 1:
            return self.args.rates[0]
        base = "gto" if name.startswith("gto") else name
        found = {}
        for rate in self.args.rates:
            folder = self.output / "tuning" / f"{base}-{rate:g}"
            options = {**VARIANTS[base], **self.cheaper(base)}
            self.train(phase1, folder, seed=0, max_steps=TUNING_STEPS, learning_rate=rate, **options)
            found[rate] = everywhere(self.measure(folder, self.tuning_texts, "tuning"), "all")
        print(f"{base}: acceptance on held-out rows by learning rate: {found}")
        return max(found, key=found.get)

    def same_time(self, name: str, phase1: Path, seconds: float, results: dict) -> None:
        """The control with as much time as a variant took."""
        rate = self.tuned_rate("control", phase1)
        own = max(spent(self.folder("control", seed)) for seed in SEEDS[: self.args.seeds])
        # A schedule needs to know its end, so it is a number of steps; rounded up, for the control.
        given = self.args.steps
        steps = given if seconds <= own else -(-int(given * seconds / own) // 5) * 5
        for seed in SEEDS[: self.args.seeds]:
            folder = self.folder("control", seed, None if steps == given else steps)
            # The time of a step is known; features from disk change how long we wait, and nothing else.
            options = {**VARIANTS["control"], **(self.cached if steps != given else {})}
            self.train(phase1, folder, seed=seed, max_steps=steps, learning_rate=rate, **options)
            results.setdefault(f"control, as long as {name} ({steps} steps)", []).append(self.measure(folder))

    def train(self, draft, folder: Path, **options) -> None:
        """One run, skipped if it is finished, resumed if it was interrupted; refused if it was another one."""
        if isinstance(draft, Path):
            draft = AutoDraft.from_pretrained(draft, dtype=torch.float32)
        settings = {
            "per_device_train_batch_size": ROWS,
            "max_length": MAX_LENGTH,
            "ttt_steps": self.args.ttt_steps,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 10 if options.get("max_steps", 0) >= 150 else 5,
            "train_sampling_strategy": "group_by_length",
            "logging_steps": 10,
            "save_steps": 50,
            "save_total_limit": 1,
            "report_to": "none",
        }
        facts = {
            "draft": weights_hash(draft),
            "rows": self.hashed,
            **{name: value for name, value in {**settings, **options}.items() if name != "features_path"},
        }
        same_as_before(folder / "facts.json", facts, folder.exists())
        if (folder / "log.json").exists():
            return
        data = Dataset.from_list([{key: row[key] for key in ("input_ids", "labels")} for row in self.rows])
        clock = Clock(folder / "seconds.json")
        trainer = GTOTrainer(
            draft,
            self.target,
            GTOConfig(str(folder), **{**settings, **options}),
            train_dataset=data,
            processing_class=self.tokenizer,
            callbacks=[clock],
        )
        # Unfinished checkpoints are skipped; a run that left nothing else starts again.
        complete = [path for path in checkpoints(str(folder)) if problem(path, []) is None]
        trainer.train(resume_from_checkpoint=True if complete else None)
        trainer.save_model()
        log = {
            "seconds_per_step": clock.per_step(),
            "steps": trainer.state.global_step,
            "features from disk": trainer.args.features_path is not None,
            "log": trainer.state.log_history,
        }
        write(folder / "log.json", json.dumps(log, indent=1))

    # ------------------------------------------------------------ measuring
    def answers(self) -> dict[str, list[tuple[str, Text]]]:
        """The target's own answers to the questions, greedy and sampled."""
        found = {}
        for temperature in (0, 1):
            path = self.output / f"answers-T{temperature}.jsonl"
            if not path.exists():
                lines = self.answer(self.asked, temperature)
                write(path, "".join(json.dumps(line) + "\n" for line in lines))
            rows = load_jsonl(path)
            texts = [(row["set"], Text(row["tokens"], row["prompt"])) for row in rows]
            found[f"T={temperature}"] = [(name, text) for name, text in texts if len(text.tokens) > text.prompt + 1]
        return found

    @torch.inference_mode()
    def answer(self, questions: list, temperature: int) -> list[dict]:
        """Answers in batches of similar length."""
        prompts = [render_prompt(self.tokenizer, q.messages(0, [])) for q in questions]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if temperature else {"do_sample": False}
        made: dict[int, list[int]] = {}
        eos = self.tokenizer.eos_token_id
        for start in tqdm(range(0, len(order), 16), desc=f"answers at T={temperature}"):
            batch = order[start : start + 16]
            inputs = self.tokenizer.pad(
                {"input_ids": [prompts[i] for i in batch]}, padding_side="left", return_tensors="pt"
            )
            torch.manual_seed(start)
            output = self.target.generate(**inputs, max_new_tokens=NEW_TOKENS, **sampling)
            for i, new in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                made[i] = new[: new.index(eos) + 1] if eos in new else new
        return [
            {"set": q.set, "id": q.id, "prompt": len(prompts[i]), "tokens": prompts[i] + made[i]}
            for i, q in enumerate(questions)
        ]

    def measure(self, folder: Path, texts: list[Text] | None = None, name: str = "acceptance") -> dict:
        """
        Acceptance of a draft: per temperature, tokens and rounds of every question.

        `everywhere` has tokens and rounds if a round started at every position of a text: its mean varies less.
        """
        path = folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        draft = AutoDraft.from_pretrained(folder, target=self.target, dtype=self.target.dtype)
        found = {}
        for key, some in self.questions.items() if texts is None else [("all", [("", text) for text in texts])]:
            plain = [text for _, text in some]
            replays = replay(draft, plain, self.read(draft, key, plain), TREE)
            found[key] = {
                "sets": [label for label, _ in some],
                "tokens": [r.statistics.emitted_tokens - 1 for r in replays],
                "rounds": [r.statistics.rounds for r in replays],
                "everywhere": [[sum(r.accepted) + len(r.accepted), len(r.accepted)] for r in replays],
            }
        write(path, json.dumps(found))
        return found

    def read(self, draft, key: str, texts: list[Text]) -> list:
        """The target's pass over texts, once for all drafts."""
        kept = self.__dict__.setdefault("_read", {})
        if key not in kept:
            kept[key] = read_texts(self.target, draft, texts)
        return kept[key]


class Clock(TrainerCallback):
    """Median seconds of a step that the processor worked: neither an interruption nor other programs count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps.append(time.process_time() - self.start)

    def on_save(self, args, state, control, **kwargs) -> None:
        write(self.path, json.dumps(self.steps))

    def per_step(self) -> float:
        return sorted(self.steps)[len(self.steps) // 2]


def digest(rows: list[dict]) -> str:
    """A hash of token ids and labels: other rows, another number."""
    text = json.dumps([[row["input_ids"], row["labels"]] for row in rows])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def same_as_before(path: Path, facts: dict, results: bool) -> None:
    """
    Write what results depend on, or compare it with what is there.

    Raises:
        ValueError: If the folder holds results of other facts, or of none that are known.
    """
    facts = json.loads(json.dumps(facts))
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} if results else facts
    for name in {**facts, **found}:
        if facts.get(name) != found.get(name):
            raise ValueError(
                f"`{path.parent}` holds results with {name} = {found.get(name)!r}, but now it is {facts.get(name)!r}. Name another "
                "folder with `--output`, or delete this one."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(facts, indent=1))


def write(path: Path, text: str) -> None:
    """A file that is whole or not there: a run may be killed at any moment."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def spent(folder: Path) -> float:
    """
    Seconds of training of a finished run.

    Raises:
        ValueError: If it read features from disk, so that its steps were cheaper than they are.
    """
    log = json.loads((folder / "log.json").read_text(encoding="utf-8"))
    if log.get("features from disk"):
        raise ValueError(
            f"`{folder}` was trained with `--no-same-time`, so the time of its steps is not known. Delete it."
        )
    return log["seconds_per_step"] * log["steps"]


def first_trained(row: dict) -> int:
    """Where the answer of a row begins; its first token belongs to the prefill."""
    return max(1, next(i for i, label in enumerate(row["labels"]) if label != -100))


# ---------------------------------------------------------------- the table
def everywhere(result: dict, key: str, chosen: list[int] | None = None) -> float:
    """Mean tokens of a round over all positions of the texts."""
    counts = result[key]["everywhere"]
    counts = counts if chosen is None else [counts[i] for i in chosen]
    return sum(tokens for tokens, _ in counts) / sum(rounds for _, rounds in counts)


def tau(result: dict, key: str, chosen: list[int] | None = None) -> float:
    """Macro acceptance length: mean over questions of tokens by rounds."""
    tokens, rounds = result[key]["tokens"], result[key]["rounds"]
    index = range(len(tokens)) if chosen is None else chosen
    return sum(tokens[i] / rounds[i] for i in index) / len(index)


def ratio(results: list[dict], base: list[dict], key: str, figure: Callable[..., float] = tau) -> str:
    """A figure over another draft's, with a bootstrap interval over questions (the same for both), seeds averaged."""
    count = len(results[0][key]["tokens"])
    draw = random.Random(0)

    def value(chosen: list[int]) -> float:
        mine, theirs = ([figure(r, key, chosen) for r in some] for some in (results, base))
        return sum(mine) / len(mine) / (sum(theirs) / len(theirs)) - 1

    drawn = sorted(value([draw.randrange(count) for _ in range(count)]) for _ in range(1000))
    return f"{value(range(count)):+.1%} [{drawn[25]:+.1%}, {drawn[974]:+.1%}]"


def finer(results: dict[str, list[dict]], key: str) -> list[str]:
    """The same comparison with a round at every position of the texts: two to three times the rounds, so less noise."""
    lines = [
        "| a round at every position | tokens per round | over Phase I | over the control, same steps | same time |"
    ]
    lines.append("|---|---|---|---|---|")
    for name, runs in results.items():
        mean = sum(everywhere(r, key) for r in runs) / len(runs)
        bases = [results["phase1"] if name != "phase1" else None]
        bases.append(results.get("control") if name not in ("phase1", "control") else None)
        bases.append(results.get(as_long_as(name, results)))
        over = ["-" if base is None else ratio(runs, base, key, everywhere) for base in bases]
        lines.append(f"| {name} | {mean:.4f} | {' | '.join(over)} |")
    return lines


def as_long_as(name: str, results: dict) -> str:
    """What the control is called that trained as long as a variant."""
    return next((other for other in results if other.startswith(f"control, as long as {name} (")), "")


def table(results: dict[str, list[dict]], args: argparse.Namespace, output: Path) -> str:
    """Markdown: acceptance length of every variant, all seeds, and paired differences."""
    lines = [
        f"Target: SmolLM2-135M-Instruct (Q4_1 GGUF, dequantized, bfloat16). Tree: depth {TREE.depth}, top-k {TREE.top_k}, "
        f"{TREE.total_tokens} nodes. {QUESTIONS} questions per set, first turns, {NEW_TOKENS} new tokens. Phase II: {args.steps} steps "
        f"of {ROWS} rows. τ is the mean over questions; intervals are 95 %, paired over questions, seeds averaged.",
        "",
    ]
    for key in ("T=0", "T=1"):
        sets = list(dict.fromkeys(results["phase1"][0][key]["sets"]))
        lines += [
            f"**{key}**",
            "",
            f"| draft | τ | {' | '.join(sets)} | seeds | over Phase I | over the control, same steps | same time |",
            f"|---|---|{'---|' * len(sets)}---|---|---|---|",
        ]
        for name, runs in results.items():
            mean = sum(tau(r, key) for r in runs) / len(runs)
            by_set = []
            for label in sets:
                chosen = [i for i, s in enumerate(runs[0][key]["sets"]) if s == label]
                by_set.append(f"{sum(tau(r, key, chosen) for r in runs) / len(runs):.3f}")
            over = ["-", "-", "-"]
            if name != "phase1":
                over[0] = ratio(runs, results["phase1"], key)
            if name not in ("phase1", "control") and "control" in results:
                over[1] = ratio(runs, results["control"], key)
            if as_long_as(name, results):
                over[2] = ratio(runs, results[as_long_as(name, results)], key)
            seeds = ", ".join(f"{tau(r, key):.3f}" for r in runs)
            lines.append(f"| {name} | {mean:.3f} | {' | '.join(by_set)} | {seeds} | {' | '.join(over)} |")
        lines += ["", *finer(results, key), ""]
    for folder in sorted((output / "tuning").glob("*/tuning.json")):
        found = everywhere(json.loads(folder.read_text(encoding="utf-8")), "all")
        lines.append(f"- tuning {folder.parent.name}: {found:.4f} tokens per round on held-out rows")
    lines += [
        "",
        f"Command: `python examples/research/comparison.py {shlex.join(sys.argv[1:])}`",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
