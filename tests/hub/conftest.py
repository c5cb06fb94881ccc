# SPDX-License-Identifier: Apache-2.0
"""The process in which the Hub is the test server; one for all tests, because it has to import everything once more."""

import pytest

from .online import worker


@pytest.fixture(scope="session")
def online_worker(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("hub")) as pool:
        yield pool
