# SPDX-License-Identifier: Apache-2.0
"""
`gto-hf train .. --plan`: check everything but the weights, and say what the run will need. Level 6.

Models are built without memory (on the meta device), so that their sizes are those of the real classes. The memory formulas
are those of `docs/scale.md`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gto_hf.checkpoints.adapters import adapter_size
from gto_hf.drafts import DRAFTS, DraftConfig, FeatureDraft
from gto_hf.gto import FEATURE_OBJECTIVES
from gto_hf.gto.reading import WIDE_ELEMENTS
from gto_hf.gto.token_loss import LOSS_ELEMENTS
from gto_hf.lora import draft_peft_config
from gto_hf.target import text_config
from gto_hf.tree import TreeConfig

from .gto_config import GTOConfig
from .load import check_target_for_training
from .plan_facts import count_rows, target_bytes, weight_bits
from .shapes import target_config


GIB = 2**30
A100_FLOPS = 0.4 * 312e12  # per second: dense half precision, 40 % of the peak


@dataclass
class PlanArguments:
    """
    Arguments of a dry run.

    Args:
        plan (`bool`, *optional*, defaults to `False`):
            Check everything but the weights, print what the run will need, and stop.
    """

    plan: bool = field(default=False, metadata={"help": "Check all but the weights, print what is needed, stop."})


@dataclass(frozen=True)
class Sizes:
    """
    Numbers that memory and time follow from.

    Attributes:
        target, draft (`int`): Parameters P and p. layers, hidden, vocab, kv (`int`): L, H and V of the target, and its heads
            of keys times their width (k · d).
        draft_vocab (`int`): v. rows, length, steps (`int`): B, T and D: rows per device, their longest length, unrolled
            steps of the token loss.
        tree (`TreeConfig`): Of training. roots (`int`): Roots per row, K · m; 0 without trees.
        score_nodes (`int`): Nodes of one target forward. element (`int`): Bytes per number of the target.
        features (`int`, *optional*, defaults to 3): Layers of the target that the draft reads.
        adapter (`int`, *optional*, defaults to 0): Parameters of a fresh adapter, which then are all that is trained.
        reference (`bool`, *optional*, defaults to `True`): Whether the tree term has a reference draft.
        target_bytes (`int`, *optional*): Of the target's weights, where they are not all of `element` bytes.
    """

    target: int
    draft: int
    layers: int
    hidden: int
    vocab: int
    kv: int
    draft_vocab: int
    rows: int
    length: int
    steps: int
    tree: TreeConfig
    roots: int
    score_nodes: int
    element: int
    features: int = 3
    adapter: int = 0
    reference: bool = True
    target_bytes: int | None = None

    @property
    def weights(self) -> int:
        """Bytes of the target's weights."""
        return self.element * self.target if self.target_bytes is None else self.target_bytes

    @property
    def trained(self) -> int:
        """Parameters with a gradient and two states of Adam."""
        return self.adapter or self.draft

    def memory(self) -> dict[str, int]:
        """Bytes on one device that holds everything, without activations of the draft's layer."""
        text, nodes = self.rows * self.length, self.rows * self.score_nodes
        size = self.element
        found = {
            "target": self.weights,
            "draft, gradient and Adam": 4 * (self.draft + self.adapter) + 12 * self.trained,
            "features of the target's layers": self.features * size * text * self.hidden,
            "last hidden states": size * text * self.hidden,
            "target logits, part by part": (size + 8) * min(WIDE_ELEMENTS, text * self.vocab),
            "draft logits of the loss": 20 * min(LOSS_ELEMENTS, self.steps * text * self.draft_vocab),
        }
        if self.roots:
            found |= {
                # An adapter's is the draft with the adapter off; our own tree terms have none.
                "reference M0": 0 if self.adapter or not self.reference else 4 * self.draft,
                "keys and values of the text": 2 * size * self.layers * text * self.kv,
                "keys and values of tree nodes": 2 * size * self.layers * nodes * self.kv,
            }
        return found

    def per_device(self, devices: int) -> dict[str, int]:
        """Bytes per device under each configuration of `examples/accelerate`, split over `devices` where it splits."""
        whole = sum(self.memory().values())
        optimizer = 12 * self.trained  # gradient and Adam's two states
        shared = self.weights + 4 * (self.draft + self.adapter) + optimizer
        # The head, and logits of the text and of the nodes of one forward, which ZeRO-3 makes whole.
        nodes = self.score_nodes if self.roots else 0
        gathered = self.element * self.vocab * (self.hidden + self.rows * (self.length + nodes))
        split = 4 * (self.draft + self.adapter) + optimizer
        found = {
            "ddp.yaml": whole,
            # Parameters and gradient are whole within a step, beside the pieces of everything.
            "fsdp2.yaml": whole - 8 * self.trained + split // devices,
            "zero2.yaml": whole - optimizer + optimizer // devices,
        }
        if self.weights == self.element * self.target:  # packed weights are never split
            found["zero3.yaml"] = whole - shared + shared // devices + gathered
        return found

    def row_flops(self, tree_nodes: int) -> float:
        """Operations for one row of full length, if `tree_nodes` go through the target: two per parameter and token."""
        expanded = 1 + (self.tree.depth - 1) * self.tree.top_k  # forwards of the draft per tree
        target = 2 * self.target * (self.length + tree_nodes)
        token_loss = 3 * 2 * self.draft * self.length * self.steps  # forward and backward
        trees = (2 if self.reference else 1) * self.roots * expanded * 2 * self.draft  # of draft and reference
        paths = 3 * 2 * self.draft * self.roots * self.tree.depth
        return float(target + token_loss + trees + paths)


def sizes_of(
    config: PreTrainedConfig, draft: DraftConfig, args: GTOConfig, peft_config: Any = None, quantization: Any = None
) -> Sizes:
    """
    Sizes of a target and a draft by their configs; also checks that trees can be scored on the target, and that a
    `peft_config` fits the draft. `quantization` is that of `target_model_init_kwargs` if it is not given, else the
    checkpoint's own.
    """
    quantization = quantization or (args.target_model_init_kwargs or {}).get("quantization_config")
    bits = weight_bits(quantization or getattr(config, "quantization_config", None))
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config).eval()
        model = DRAFTS[draft.draft_type](draft)
        drafted, adapter = model.num_parameters(), 0
        if peft_config is not None:
            adapter = adapter_size(model, draft_peft_config(peft_config, model))
    tree = args.tree(TreeConfig(**draft.tree))
    check_target_for_training(target, tree, args)
    text = text_config(target)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = str((args.target_model_init_kwargs or {}).get("dtype") or "auto").removeprefix("torch.")
    if dtype == "auto":  # what `from_pretrained` does when nothing is asked for: as the checkpoint says
        dtype = str(getattr(config, "dtype", None) or text.dtype or torch.float32).removeprefix("torch.")
    recipe = FEATURE_OBJECTIVES.get(args.token_objective)
    element = 2 if dtype in ("bfloat16", "float16") else 4
    return Sizes(
        target=sum(parameter.numel() for parameter in target.parameters()),
        draft=drafted,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        kv=heads * width,
        draft_vocab=draft.draft_vocab_size,
        rows=args.per_device_train_batch_size,
        length=args.max_length,
        steps=args.ttt_steps or (recipe.steps if recipe else tree.depth),
        tree=tree,
        roots=args.num_groups * args.group_size if args.gto_weight > 0 else 0,
        score_nodes=args.score_nodes,
        element=element,
        features=len(draft.feature_layers or ()),
        adapter=adapter,
        reference=args.gto_objective == "gto",
        target_bytes=target_bytes(target, element, bits),
    )


def fresh_vocab(draft_type: str, asked: int | None, vocab: int) -> int:
    """Tokens that a fresh draft can say: what is asked for, else 32,000, or all where the head is the target's own."""
    return min(asked or (vocab if DRAFTS[draft_type].predicts_features else 32000), vocab)


def draft_config(
    path: str | None, target: PreTrainedConfig, draft_vocab_size: int | None = None, draft_type: str = "eagle3"
) -> tuple[DraftConfig, str]:
    """
    A draft's config, and where its sizes come from.

    Args:
        path (`str`, *optional*): Folder or Hub id of the draft; None makes a fresh one.
        target (`PreTrainedConfig`): Config of the target. draft_vocab_size (`int`, *optional*), draft_type (`str`,
            *optional*): Of a fresh or unseen draft, as for training.

    Raises:
        ValueError: If a folder's draft is made for other sizes than the target's.
    """
    source = target.get_text_config()
    file = Path(path or "") / "config.json"
    stored: dict[str, Any] = {}
    if path is not None and file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))
        for name, mine in (("vocab_size", source.vocab_size), ("target_hidden_size", source.hidden_size)):
            if stored.get(name) is not None and stored[name] != mine:
                raise ValueError(
                    f"The draft `{path}` has `{name}={stored[name]}`, but the target has {mine}. Name the target that "
                    "it was made for."
                )
        if stored.get("draft_type") in DRAFTS:  # saved by this package: the config says everything
            return DraftConfig(**stored), f"as {file} says"
    cls = DRAFTS[draft_type]
    if not issubclass(cls, FeatureDraft):
        raise ValueError(f"`--plan` cannot size a draft of type `{draft_type}` that is not here.")
    vocab = fresh_vocab(draft_type, draft_vocab_size, source.vocab_size)
    said = f"`{draft_type}`, shaped like the target, {vocab} tokens"
    if stored:
        vocab, said = stored.get("draft_vocab_size") or source.vocab_size, f"as {file} says"
    elif path is not None:
        said += "; the draft itself has not been looked at"
    heads = source.num_attention_heads
    fields = {
        "draft_type": draft_type,
        "vocab_size": source.vocab_size,
        "draft_vocab_size": vocab,
        "target_hidden_size": source.hidden_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // heads,
        "feature_layers": cls.default_layers(source.num_hidden_layers),
    }
    own = {name: stored[name] for name in (*fields, "own_embeddings", "tree") if stored.get(name) is not None}
    return DraftConfig(**{**fields, **own}), said


def plan_text(
    args: GTOConfig,
    target: str,
    draft: str | None,
    draft_vocab_size: int | None,
    dataset: str,
    devices: int = 8,
    draft_type: str = "eagle3",
    peft_config: Any = None,
    quantization: Any = None,
) -> str:
    """
    What a run will need, after everything but the weights was checked.

    Args:
        args ([`GTOConfig`]): The run's. target (`str`), draft (`str`, *optional*): Folders or Hub ids.
        draft_vocab_size (`int`, *optional*), draft_type (`str`, *optional*): Of a draft that is fresh or not here.
        dataset (`str`): Folder, file or Hub id. devices (`int`, *optional*, defaults to `8`): What the splitting
            configurations split over. peft_config ([`~peft.PeftConfig`], *optional*): Of a fresh adapter.
        quantization (`QuantizationConfigMixin`, *optional*): Of the target.

    Raises:
        ValueError: For everything that would stop the run before its first step and can be seen without weights.
    """
    if args.max_length is None:
        raise ValueError("`max_length=None`: a plan needs the longest row, in tokens.")
    config = target_config(target)
    draft_shape, said = draft_config(draft, config, draft_vocab_size, draft_type)
    sizes = sizes_of(config, draft_shape, args, peft_config, quantization)
    rows, counted = count_rows(dataset)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    all_rows = args.max_steps * per_step if args.max_steps > 0 else rows * args.num_train_epochs
    most = (2 if sizes.reference else 1) * sizes.roots * sizes.tree.total_tokens
    hours = [all_rows * sizes.row_flops(nodes) / A100_FLOPS / 3600 for nodes in (0, most)]
    digits = 0 if hours[0] >= 1 else 2
    share = " for each device" if args.max_steps > 0 else ""
    tree = sizes.tree
    lines = [
        f"target: {target}: {sizes.target / 1e9:.2f}e9 parameters, {sizes.layers} layers, width {sizes.hidden}, "
        f"{sizes.vocab} tokens",
        f"draft: {draft or 'a fresh one'}: {sizes.draft / 1e9:.2f}e9 parameters ({said})"
        + (f", of an adapter {sizes.adapter / 1e6:.2f}e6 are trained" if sizes.adapter else ""),
        f"data: {dataset}: {counted}",
        f"trees: depth {tree.depth}, top-k {tree.top_k}, {tree.total_tokens} nodes; {sizes.roots} roots per row; at most {most} "
        "nodes per row through the target, fewer as equal nodes are merged",
        f"steps: {_steps(args, rows, per_step)}",
        "",
        "memory, GiB on a device that holds everything (activations of the draft's layer come on top):",
        *(f"  {name}: {size / GIB:.2f}" for name, size in sizes.memory().items()),
        f"per device, split over {devices} where the configuration splits:",
        *(f"  {name}: {size / GIB:.1f}" for name, size in sizes.per_device(devices).items()),
        "",
        f"time: {hours[0]:.{digits}f} to {hours[1]:.{digits}f} A100-hours by arithmetic{share}, at 40 % of 312 TFLOP/s and with every row "
        f"{args.max_length} tokens long: the first if no tree node needed a forward of its own, the second if every one did",
        "checked: options, trees, sizes and the target's architecture. Not looked at: weights"
        + ("" if Path(dataset).exists() else ", data"),
    ]
    return "\n".join(lines)


def _steps(args: GTOConfig, rows: int, per_step: int) -> str:
    each = f"{per_step} rows per step and device: "
    if args.max_steps > 0:  # they end the run, whatever `num_train_epochs` says
        return f"{each}`max_steps={args.max_steps}`, {args.max_steps * per_step} rows on one device"
    counts = (f"{rows * args.num_train_epochs / per_step / count:.0f} on {count}" for count in (1, 8))
    return f"{args.num_train_epochs:g} epochs of {rows} rows, {each}{', '.join(counts)}"
