# SPDX-License-Identifier: Apache-2.0
"""The TRL trainer (level 6). Importing it imports trl."""

from .gto_config import GTOConfig
from .gto_trainer import GTOTrainer


__all__ = ["GTOConfig", "GTOTrainer"]
