# SPDX-License-Identifier: Apache-2.0
"""Decoding with draft trees: `model.generate(..., custom_generate="@REPO@", trust_remote_code=True)`."""

from weakref import WeakKeyDictionary

import gto_hf


REPO = "@REPO@"
_drafts = WeakKeyDictionary()  # by target: the draft that was loaded for it


def generate(model, draft=None, assistant_model=None, **kwargs):
    """
    As `model.generate`, with this repository's draft.

    Args:
        model: The target.
        draft (`str`, *optional*): Folder or Hub id of another draft; defaults to this repository.
        assistant_model (*optional*): A draft that is loaded already.
        **kwargs: What `generate` takes.
    """
    if assistant_model is None:
        source = str(draft or REPO)
        found = _drafts.setdefault(model, {})
        if source not in found:
            found[source] = gto_hf.AutoDraft.from_pretrained(source, target=model, dtype=model.dtype).to(model.device)
        assistant_model = found[source]
    gto_hf.install()
    return type(model).generate(model, assistant_model=assistant_model, **kwargs)
