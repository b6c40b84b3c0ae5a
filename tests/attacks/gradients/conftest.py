"""One thread for all tests of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_matrices(one_thread: None) -> None:
    """Matrices are small here: a second thread costs more than it brings, and on a busy machine a hundred times."""
