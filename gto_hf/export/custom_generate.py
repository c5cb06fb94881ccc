# SPDX-License-Identifier: Apache-2.0
"""
A repository for `model.generate(custom_generate="owner/name", trust_remote_code=True)`. Level 4.

The repository holds the draft in gto-hf's own format and a `generate` that decodes with it; transformers reads
`custom_generate/generate.py` and `custom_generate/requirements.txt` of it.
"""

from __future__ import annotations

import shlex
from importlib.metadata import version
from importlib.resources import files
from os import PathLike
from pathlib import Path

from gto_hf.drafts import DraftModel
from gto_hf.target import is_hub_id

from .folder import check_free, whole_folder
from .write import Exported


CUSTOM_GENERATE = "custom-generate"


def export_custom_generate(
    draft: DraftModel, folder: str | PathLike, repo: str, *, target_name: str | None = None, overwrite: bool = False
) -> Exported:
    """
    Write a `custom_generate` repository around a draft.

    Args:
        draft ([`DraftModel`]): The draft; stored as it is.
        folder (`str`): Where to write. repo (`str`): Hub id that the folder will have: its code loads the draft from there.
        target_name (`str`, *optional*): Hub id of the target, for the card; defaults to what the draft's config says.
        overwrite (`bool`, *optional*, defaults to `False`): Replace what is in `folder`.

    Raises:
        ValueError: If `repo` is no Hub id or the folder is taken.
    """
    folder = Path(folder)
    if not is_hub_id(repo) or "/" not in repo:
        raise ValueError(
            f"`repo={repo!r}` must be the Hub id (`owner/name`) that the folder will have: its code loads the draft from "
            "there."
        )
    name = target_name or (draft.config.target or {}).get("name_or_path")
    name = name if is_hub_id(name) else None
    check_free(folder, overwrite=overwrite, sources=(draft.config.name_or_path,))
    templates = files("gto_hf") / "assets" / "custom_generate"
    values = {"@REPO@": repo, "@TARGET@": name or "path/to/target", "@VERSION@": version("gto-hf")}
    base = f"\nbase_model: {name}" if name else ""
    with whole_folder(folder) as inside:
        draft.save_pretrained(inside)
        for path in ("README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"):
            name = Path(path).name + ".in"
            text = (templates / name).read_text(encoding="utf-8").replace("\n@BASE_MODEL@", base)
            for mark, value in values.items():
                text = text.replace(mark, value)
            (inside / path).parent.mkdir(exist_ok=True)
            (inside / path).write_text(text, encoding="utf-8")
    commands = {
        "upload": f"hf upload {repo} {shlex.quote(str(folder))}",
        "transformers (tree)": f'model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)',
    }
    return Exported(folder, CUSTOM_GENERATE, commands)
