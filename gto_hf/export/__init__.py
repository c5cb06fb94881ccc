# SPDX-License-Identifier: Apache-2.0
"""The doors out (level 4): drafts in the layouts of other engines, and as a `custom_generate` repository."""

from .dialects import DIALECTS, ENGINES, Dialect, find_dialect
from .limits import check_exportable
from .write import Exported, export


__all__ = ["DIALECTS", "ENGINES", "Dialect", "Exported", "check_exportable", "export", "find_dialect"]
