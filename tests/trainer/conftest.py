# SPDX-License-Identifier: Apache-2.0
"""Rows that tiny targets wrote."""

import pytest

from tests.tiny import written_rows


@pytest.fixture
def rows(llama):
    return written_rows(llama, 8, 24)
