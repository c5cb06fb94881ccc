# SPDX-License-Identifier: Apache-2.0
"""
[`GTOTrainer`]: fetch, call the functions of `gto_hf.gto`, log. The mathematics is not here. Level 6.

Phase I (`gto_weight=0`) trains the token loss; Phase II adds the GTO term.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from trl.models.utils import _ForwardRedirection
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gto_hf.decoding import as_draft
from gto_hf.drafts import DraftModel
from gto_hf.gto import (
    TargetReading,
    count_groups,
    draft_forward,
    padded_positions,
    roots_of,
    row_generators,
    row_seeds,
    sample_groups,
    supervised_steps,
    supervised_targets,
)
from gto_hf.lora import Reference, draft_peft_config, is_peft

from .acceptance import Acceptance, kept_rng
from .forward import at_least_two_columns, bare_forward, switch_off_dropout, without_repeats
from .frozen import FlushStores, TargetReader
from .gto_config import GTOConfig
from .load import (
    check_columns,
    check_devices,
    check_target_for_training,
    eos_ids,
    load_draft,
    load_target,
    load_tokenizer,
    name_target,
)
from .logs import log_tokens, logged_names
from .nonfinite import check_gradient, explain_nonfinite_trees, nonfinite_loss
from .place import is_split, largest_over_ranks, place_target
from .push import AdapterPushCallback, PushingTrainer
from .recompute import without_checkpointing
from .reference import is_untrained, reference_fingerprint, warn_untrained
from .report import ReportCallback
from .rows import RowPreparation
from .sharded import evaluating, full, whole
from .sums import Sums
from .terms import Plan, TreeTerm, tree_term
from .tokens import TokenTerm


class GTOTrainer(PushingTrainer):
    """
    Trainer for draft models with Group Tree Optimization, proposed in the paper [Bridging Draft Policy Misalignment:
    Group Tree Optimization for Speculative Decoding](https://huggingface.co/papers/2509.22134).

    Example:

    ```python
    >>> from gto_hf import AutoDraft, GTOConfig, GTOTrainer

    >>> trainer = GTOTrainer(
    ...     model=AutoDraft.from_pretrained("path/to/draft"),
    ...     target_model=target,
    ...     args=GTOConfig("my-draft"),
    ...     train_dataset=dataset,
    ... )
    >>> trainer.train()
    ```

    Args:
        model (`str`, [`DraftModel`] or [`~peft.PeftModel`]):
            Draft to train. Its state now is the reference M0.
        target_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Frozen target. Defaults to `args.target_model_name_or_path`, then to the one the draft's config names.
        args ([`GTOConfig`], *optional*):
            Configuration.
        data_collator (`Callable`, *optional*):
            Must give `input_ids`, `attention_mask` and `labels`. Defaults to TRL's language-modelling collator.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            `messages`, ShareGPT `conversations`, `prompt` + `completion`, `text`, or `input_ids` (+ `labels` or a mask);
            see [`~gto_hf.data.RowEncoder`]. Rows that cannot be trained on are skipped and counted.
        eval_dataset (`Dataset`, `IterableDataset` or `dict`, *optional*):
            As `train_dataset`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The target's tokenizer; loaded from the target if not given.
        compute_metrics (`Callable`, *optional*):
            Not supported for drafts; the logged metrics say what there is to say.
        callbacks (`list`, *optional*):
            Trainer callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Train an adapter on the draft; the reference is then the draft with the adapter off.
        formatting_func (`Callable`, *optional*):
            As in [`~trl.SFTTrainer`].

    Raises:
        ValueError: If draft and target do not fit, the tree is larger than its expansion, or no row of the dataset has a
            trainable token; before any training.
    """

    _tag_names = ["trl", "gto", "speculative-decoding"]  # the card adds that of the draft type
    _name = "GTO"
    _paper = {
        "title": "Bridging Draft Policy Misalignment: Group Tree Optimization for Speculative Decoding",
        "id": "2509.22134",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @misc{hu2025bridging,
                title  = {{Bridging Draft Policy Misalignment: Group Tree Optimization for Speculative Decoding}},
                author = {Shijing Hu and Jingyang Li and Zhihui Lu and Pan Zhou},
                year   = 2025,
                eprint = {arXiv:2509.22134}
            }"""),
    }
    # Both terms are divided by counts of the whole accumulated batch, so Trainer must not divide again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | DraftModel | nn.Module,
        target_model: str | PreTrainedModel | None = None,
        args: GTOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        formatting_func: Callable | None = None,
    ) -> None:
        # Args
        args = GTOConfig("gto-draft") if args is None else args
        if not isinstance(args, GTOConfig):
            raise TypeError(f"`args` must be a GTOConfig, got {type(args).__name__}.")
        if compute_metrics is not None:
            raise ValueError("`compute_metrics` gets no predictions from a draft; read the logged metrics instead.")
        check_devices(args)

        # Draft
        set_seed(args.seed)
        model = load_draft(model, args)
        draft = as_draft(model)

        # Target
        self.target_model = load_target(target_model, draft, args)
        draft.attach(self.target_model, processing_class)
        name_target(draft, self.target_model)

        # Tree
        self.tree = args.tree(draft.tree)
        if self.tree.top_k > draft.config.draft_vocab_size:
            raise ValueError(
                f"`tree_top_k={self.tree.top_k}` is more than the draft's vocabulary of {draft.config.draft_vocab_size}."
            )
        self.tokens = TokenTerm(args, draft, self.tree)
        self.ttt_steps = self.tokens.steps
        check_target_for_training(self.target_model, self.tree, args)

        # Reference
        if args.disable_dropout:
            switch_off_dropout(model)
        if peft_config is not None:
            if is_peft(model):
                raise ValueError("`model` has an adapter already; merge it, or leave `peft_config` unset to train it.")
            peft_config = draft_peft_config(peft_config, draft)
        self.reference = None
        if is_untrained(draft):
            warn_untrained(args)
        if args.gto_weight > 0 and args.gto_objective == "gto":
            self.reference = Reference(model, fresh_adapter=peft_config is not None)
            self.reference_hash = reference_fingerprint(model)

        # Processing class
        trusted = args.trust_remote_code
        processing_class = load_tokenizer(processing_class, self.target_model, draft, trust_remote_code=trusted)
        if data_collator is None:
            data_collator = DataCollatorForLanguageModeling(
                pad_token_id=processing_class.pad_token_id, pad_to_multiple_of=args.pad_to_multiple_of
            )

        check_columns(train_dataset, args.dataset_text_field, formatting_func)
        self._rows = RowPreparation(args, draft)
        own_forward = draft.__dict__.get("forward")
        with self._rows.without_assistant_masks(args):
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                formatting_func=formatting_func,
            )
        if args.disable_dropout:  # that of a fresh adapter
            switch_off_dropout(self.model)
        # SFTTrainer replaces the model's forward by one with a fused language-model head; a draft keeps its own.
        draft.__dict__.pop("forward", None)
        if own_forward is not None:
            draft.__dict__["forward"] = own_forward
        longest = self._rows.announce(self) or args.max_length
        draft.config.trained_length = max(draft.config.trained_length or 0, longest or 0) or None

        # Frozen models
        self._eos_ids = eos_ids(self.target_model, processing_class, self.accelerator.device)
        self._place_frozen(draft)
        self._acceptance = Acceptance(args, self.target_model, draft, self.accelerator)

        # Metrics
        self._forward_redirection = _ForwardRedirection()
        means, totals = logged_names(self.ttt_steps, None if self.term is None else args.gto_objective)
        self._sums = {mode: Sums(means, totals) for mode in ("train", "eval")}
        self._batch_counts: tuple[torch.Tensor, torch.Tensor] | None = None
        self.eval_groups_step = 0  # evaluation draws the groups of this step, the same every time
        self._eval_prefix = "eval"
        self.add_callback(AdapterPushCallback())
        self.add_callback(ReportCallback())

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: GTOConfig,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """Rows that can be trained on, as tokens and labels; then as in [`~trl.SFTTrainer`]."""
        encoder = self._rows.encoder(processing_class, args, formatting_func)
        dataset = self._rows.prepare(dataset, encoder, dataset_name, args.dataset_num_proc)
        return super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)

    def _place_frozen(self, draft: DraftModel) -> None:
        """Put target and reference where training happens, and say what is kept of their answers."""
        self.target_model = place_target(self.target_model, self)
        if self.reference is not None:
            self.reference.prepare(self.accelerator.device)
        held = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        datasets = [dataset for dataset in (self.train_dataset, *held) if dataset is not None]
        self._reader = TargetReader(self.target_model, draft, self.args, datasets, split=is_split(self))
        self.term: TreeTerm | None = tree_term(self)
        kept = (self._reader.features, getattr(self.term, "memory", None))
        self.add_callback(FlushStores(*(one.store for one in kept if one is not None)))

    # ------------------------------------------------------------------ normalisers
    def _targets(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """`(B, T)` bool: tokens the draft is asked to predict."""
        labels, ids = inputs["labels"], inputs["input_ids"]
        if labels.shape != ids.shape:
            raise ValueError(
                f"`labels` have shape {tuple(labels.shape)}, `input_ids` {tuple(ids.shape)}: every row needs one label per "
                "token, -100 where it is not trained."
            )
        return supervised_targets(labels, ids, self._eos_ids.to(ids.device), inputs["attention_mask"])

    def _counts(self, inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Token-loss roots and groups of one micro-batch; both follow from its labels alone."""
        roots = roots_of(self._targets(inputs))
        groups = count_groups(roots, self.args.num_groups, self.args.group_size) if self.term is not None else 0
        return int(roots.sum()), groups

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Collect the micro-batches of a step and count roots and groups over all of them and all ranks."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = torch.tensor([self._counts(s) for s in samples] or [[0, 0]], device=device).sum(0)
        counts = self.accelerator.reduce(counts, reduction="sum")
        self._batch_counts = (counts[0].clamp(min=1), counts[1].clamp(min=1))
        self._samples = samples
        return samples, counts[0]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As in [`~transformers.Trainer`]; a gradient that is not finite stops the run before it is used."""
        grad_norm = full(super()._get_grad_norm(model, grad_norm))
        check_gradient(self, grad_norm, self._samples)
        return grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in [`~transformers.Trainer`]; a draft that FSDP2 has split is whole from the trees to the backward pass."""
        with whole(self.model, gradients=True):
            return super().training_step(*args, **kwargs)

    # ------------------------------------------------------------------ loss
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """
        `L = L_token + gto_weight * L_GTO` of one micro-batch, as its share of the whole batch.

        Raises:
            FloatingPointError: If the loss is NaN or infinite, with the cause and the rows; nothing has been updated with it.
        """
        mode = "train" if self.model.training else "eval"
        sums = self._sums[mode]
        inputs = at_least_two_columns(inputs)
        unwrapped = self.accelerator.unwrap_model(model)
        draft = as_draft(unwrapped)
        targets = self._targets(inputs)
        roots = roots_of(targets)
        root_list, real = padded_positions(roots)
        groups, valid = self._sample_groups(roots, inputs) if self.term is not None else (None, None)
        with_groups = groups is not None and bool(largest_over_ranks(self, int(valid.any())))
        reading = self._reader.read(inputs, root_list, real, use_cache=with_groups)
        supervised = supervised_steps(targets, root_list, self.ttt_steps) & real[..., None]

        largest = partial(largest_over_ranks, self)
        of_tokens = self.tokens.loss(draft, reading, root_list, supervised, largest, training=mode == "train")
        with self.accelerator.autocast():
            plan = self._plan(unwrapped, draft, reading, groups, valid) if with_groups else None
            of_trees = None if plan is None else partial(self.term.forward, plan=plan)
            with bare_forward(unwrapped):
                tokens, values = self._forward_redirection(
                    model,
                    unwrapped,
                    draft_forward,
                    draft,
                    self.tokens.read(reading.sequences, training=mode == "train"),
                    root_list,
                    self.ttt_steps,
                    of_tokens,
                    of_trees,
                    detach=self.tokens.recipe is not None,
                )
        token_count, group_count = self._normalisers(mode, inputs)
        loss = tokens.loss / token_count
        if plan is not None:
            loss = loss + self.args.gto_weight * self.term.loss(values, plan, sums) / group_count
        log_tokens(sums, tokens, skipped=None if groups is None else (targets.any(1) & ~valid.any(1)).sum())
        if mode == "train":
            self._total_train_tokens += int(self.accelerator.reduce(inputs["attention_mask"].sum(), reduction="sum"))
        if not torch.isfinite(loss):
            finite = None if plan is None else (plan.valid, self.term.finite(values, plan))
            raise nonfinite_loss(self, reading, ~tokens.rows.isfinite(), finite)
        # Gradients are averaged over ranks, the counts are sums over ranks.
        loss = loss * self.accelerator.num_processes if mode == "train" else loss
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def _normalisers(self, mode: str, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        """Roots and groups that the sums are divided by: the whole batch's in training, this one's in evaluation."""
        if mode == "train" and self._batch_counts is not None:
            return self._batch_counts
        tokens, groups = self._counts(inputs)
        return max(tokens, 1), max(groups, 1)

    def _sample_groups(self, roots: torch.Tensor, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups of this micro-batch; they follow from seed, step and row, so ranks, layout and resuming change nothing."""
        args, step = self.args, self.state.global_step if self.model.training else self.eval_groups_step
        # Of sampled paths too.
        self._seeds = row_seeds(args.seed, step, inputs["input_ids"], inputs["attention_mask"].bool())
        rows = row_generators(self._seeds) if args.group_positions == "random" else None
        return sample_groups(roots, args.num_groups, args.group_size, rows)

    def _plan(
        self,
        unwrapped: nn.Module,
        draft: DraftModel,
        reading: TargetReading,
        groups: torch.Tensor,
        valid: torch.Tensor,
    ) -> Plan:
        """Trees and what the target says about them; no gradient."""
        with (
            without_checkpointing(self.model, self.args.activation_checkpointing_kwargs),
            explain_nonfinite_trees(self, draft, reading),
        ):
            return self.term.plan(unwrapped, draft, reading, groups, valid, self._seeds)

    # ------------------------------------------------------------------ logging
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the collected means and totals of the interval, over all ranks."""
        mode = "train" if self.model.training else "eval"
        found = self._sums[mode].pop(self.accelerator)
        steps = [found[f"accuracy/step_{k}"] for k in range(self.ttt_steps) if f"accuracy/step_{k}" in found]
        if steps:
            # Chain acceptance length if steps were independent: 1 + a0 + a0 a1 + ..
            found["tau_simulated"] = 1.0 + sum(torch.tensor(steps).cumprod(0).tolist())
        if mode == "eval":
            found = {f"{self._eval_prefix}_{key}": value for key, value in found.items()}
        else:
            found["num_tokens"] = self._total_train_tokens
            found.update(self._rows.logs())
        logs.update(found)
        self._metrics[mode].clear()
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As in [`~trl.SFTTrainer`]; with a dictionary of datasets every one logs under its own name."""
        self._eval_prefix = metric_key_prefix
        self._sums["eval"].clear()
        with kept_rng():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As in [`~transformers.Trainer`]; then prompts of the dataset are decoded, see [`Acceptance`]."""
        with evaluating(self):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            found = self._acceptance.measure(self.model, dataloader)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss only: a draft has no predictions of its own."""
        inputs = without_repeats(self._prepare_inputs(inputs), self.accelerator)
        with torch.no_grad():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None
