# SPDX-License-Identifier: Apache-2.0
"""
A draft type of your own in one file: registered, trained with GTOTrainer, decoded losslessly, saved and loaded by name.

    python examples/custom_draft.py

A small network without attention reads the target's last feature and the token after it. The rest (trees, losses, checkpoints) is the package's.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn

from gto_hf import AutoDraft, DraftConfig, DraftModel, GTOConfig, GTOTrainer, TreeConfig, verify_lossless
from gto_hf.data import load_jsonl
from gto_hf.drafts import DRAFTS, DraftOutput
from gto_hf.quickstart import SMOKE, load_rows, load_target
from gto_hf.target import text_config


class MLPDraft(DraftModel):
    """Two layers on `[feature; embedding]`; what they add to the feature is the next feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mix = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.post_init()

    def fuse(self, target_features):
        return target_features.to(self.device, self.dtype)  # one layer of the target's width: nothing to fuse

    def forward(self, input_ids, features, position_ids, past, past_mask, nodes=None, node_mask=None, embeddings=None):
        embeddings = self.embed(input_ids) if embeddings is None else embeddings
        both = torch.cat([self.norms[0](features), self.norms[1](embeddings)], dim=-1)
        return DraftOutput(features + self.mix(both), key_values=[])  # attends to nothing

    def head(self, features):
        return self.lm_head(features)

    @classmethod
    def from_target(cls, target, tree):
        """Reads the target's last state, which its own head reads too: start from that head."""
        source = text_config(target)
        sizes = {"vocab_size": source.vocab_size, "hidden_size": source.hidden_size, "num_attention_heads": 1}
        config = DraftConfig(draft_type="mlp", feature_layers=[source.num_hidden_layers], tree=tree.to_dict(), **sizes)
        draft = cls(config).attach(target)
        draft.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
        return draft


DRAFTS["mlp"] = MLPDraft  # `AutoDraft.from_pretrained` knows it from here on


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--rows", type=Path, help="rows in any format of the trainer (default: some shipped answers)")
    parser.add_argument("--output", default="runs/mlp-draft")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)
    target, tokenizer = load_target(args.target)
    rows = Dataset.from_list(load_jsonl(args.rows) if args.rows else load_rows(target, tokenizer, SMOKE, None))
    draft = MLPDraft.from_target(target, TreeConfig(depth=3, top_k=4, total_tokens=8))
    config = GTOConfig(args.output, learning_rate=1e-3, num_groups=2, max_steps=args.steps, report_to="none")
    trainer = GTOTrainer(draft, target, config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    loaded = AutoDraft.from_pretrained(args.output, target=target, dtype=target.dtype)
    prompts = [row["input_ids"][:16] for row in trainer.train_dataset.select(range(3))]
    print(type(loaded).__name__, verify_lossless(target, loaded, prompts), sep="\n")


if __name__ == "__main__":
    main()
