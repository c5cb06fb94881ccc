# SPDX-License-Identifier: Apache-2.0
"""`python -m gto_hf` is `gto-hf`."""

import sys

from .cli import main


sys.exit(main())
