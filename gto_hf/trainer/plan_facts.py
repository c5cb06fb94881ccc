# SPDX-License-Identifier: Apache-2.0
"""What a plan reads from files and options: rows of the training data, and bytes of a target's weights. Level 6."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn


SHAREGPT_ROWS = 68_000  # as EAGLE-3's training code counts it; used where the data is not here
# Bits per weight: 4-bit formats keep a scale of 32 bits for every 64 weights beside the 4.
_BITS = {"4bit": 4.5, "8bit": 8.0}


def count_rows(dataset: str) -> tuple[int, str]:
    """
    Rows of the training data as `datasets` would read them, and how they were counted.

    Args:
        dataset (`str`): A file (Parquet, CSV, JSON or JSON Lines), a folder or a Hub id; the last two are not looked into.
    """
    path = Path(dataset)
    if not path.is_file():
        found = "a folder, not counted" if path.is_dir() else "not here"
        return SHAREGPT_ROWS, f"{found}; {SHAREGPT_ROWS} rows assumed (ShareGPT)"
    try:
        rows = {".parquet": _parquet, ".csv": _csv}.get(path.suffix, _json)(path)
    except Exception as error:  # the readers raise what they like
        raise ValueError(f"`{dataset}` could not be read: {error}") from error
    return rows, f"{rows} rows"


def _parquet(path: Path) -> int:
    from pyarrow.parquet import read_metadata

    return read_metadata(path).num_rows


def _csv(path: Path) -> int:
    import pandas  # which `datasets` reads CSV files with: a quoted text may hold line ends

    return sum(len(part) for part in pandas.read_csv(path, chunksize=10_000))


def _json(path: Path) -> int:
    with path.open("rb") as file:
        lines = (line.strip() for line in file)
        first = next((line for line in lines if line), b"")
        if not first.startswith(b"["):
            return sum(bool(line) for line in lines) + bool(first)
    return len(json.loads(path.read_text(encoding="utf-8")))  # one list


def weight_bits(quantization: Any) -> float | None:
    """
    Bits per weight of the target's inner linear layers, None if they are not quantized.

    Args:
        quantization (`dict` or `QuantizationConfigMixin`, *optional*): As `from_pretrained` takes it, or as a checkpoint's
            config holds it.

    Raises:
        ValueError: If the bits cannot be told from it: the target's memory would be a guess.
    """
    if quantization is None:
        return None
    given = quantization if isinstance(quantization, dict) else quantization.to_dict()
    for name, bits in _BITS.items():
        if given.get(f"load_in_{name}"):
            return bits
    bits = given.get("bits")
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    if isinstance(bits, int):
        return _BITS.get(f"{bits}bit", float(bits))
    if "fp8" in method:
        return 8.0
    raise ValueError(
        f"`--plan` cannot tell the bits per weight of the target's quantization ({method}). Plan without it, and take the "
        "target's memory from the size of its files."
    )


def target_bytes(target: nn.Module, element: int, bits: float | None) -> int:
    """
    Bytes of a target's weights.

    Args:
        target (`PreTrainedModel`): May be on the meta device. element (`int`): Bytes of a number that is not quantized.
        bits (`float`, *optional*): Per weight of the linear layers; the head, as is usual, is not quantized.
    """
    whole = element * sum(parameter.numel() for parameter in target.parameters())
    if bits is None:
        return whole
    head = target.get_output_embeddings()
    packed = sum(m.weight.numel() for m in target.modules() if isinstance(m, nn.Linear) and m is not head)
    return int(whole - packed * (element - bits / 8))
