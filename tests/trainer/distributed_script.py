# SPDX-License-Identifier: Apache-2.0
"""Run by test_distributed.py, alone or under torchrun; writes the trained draft and the log of every rank."""

import json
import os
import sys

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from gto_hf import AutoDraft, GTOConfig, GTOTrainer
from tests.tiny import tiny_draft, tiny_target, tiny_tokenizer, written_rows


def turn_fsdp_on_for_cpus() -> None:
    """On CPUs accelerate takes DDP, whatever FSDP plugin it is given; torch's FSDP2 runs there all the same."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def main(
    folder: str,
    lora: bool = False,
    resume: bool = False,
    draft: str | None = None,
    target: str | None = None,
    evaluate_first: bool = False,
    count: int = 8,
    **options: object,
) -> None:
    rows = written_rows(tiny_target(), count, 30)
    for i in range(1, count, 2):  # every second row, so every batch of one rank, is too short for a group
        rows[i] = {key: ids[:7] for key, ids in rows[i].items()}
    rows[5]["labels"] = [-100, rows[5]["input_ids"][1]] + [-100] * 5  # nothing to train at all
    args = GTOConfig(
        folder,
        per_device_train_batch_size=1 if "RANK" in os.environ else 2,
        num_groups=2,
        group_size=8,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
        per_device_eval_batch_size=2,
        eval_prompts=2,
        eval_max_new_tokens=8,
        **{"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "no", "bf16": False, **options},
    )
    if "fsdp" in options:
        turn_fsdp_on_for_cpus()
    if "deepspeed" in options:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")  # accelerate does so on GPUs, but not on a CPU
    # Under ZeRO-3 what is loaded from here on is split over the ranks.
    model = AutoModelForCausalLM.from_pretrained(target) if target else tiny_target()
    draft = AutoDraft.from_pretrained(draft) if draft else tiny_draft(model)
    held_out = {"three": Dataset.from_list(rows[:3]), "one": Dataset.from_list(rows[:1])}
    held_out["stream"] = IterableDataset.from_generator(lambda: iter(rows[:4]))
    trainer = GTOTrainer(
        draft,
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=held_out,
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, init_lora_weights=False) if lora else None,
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    trainer.save_model(f"{folder}/final")
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    state = {k: v.detach().full_tensor() if isinstance(v, DTensor) else v.detach().clone() for k, v in state.items()}
    found = {
        "state": state,
        "logs": trainer.state.log_history,
        "metrics": metrics,
        "tokens": trainer._total_train_tokens,
        "wrapper": type(trainer.model_wrapped).__name__,
    }
    torch.save(found, f"{folder}/rank{rank}.pt")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
