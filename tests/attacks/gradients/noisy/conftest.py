"""A small batch whose update was rounded, and the prefixes that it holds."""

from __future__ import annotations

import pytest

from unmask.defences import quantise_bf16
from unmask.protocols import observe_gradients

BATCH = ((5, 17, 99, 17, 250, 8, 30), (400, 3, 8, 21, 11, 12), (400, 3, 8, 9))


@pytest.fixture(scope="session")
def batch():
    return BATCH


@pytest.fixture(scope="session")
def rounded(tiny_llama):
    return quantise_bf16(observe_gradients(tiny_llama, [list(text) for text in BATCH]))


@pytest.fixture(scope="session")
def prefixes():
    return {text[:length] for text in BATCH for length in range(1, len(text))}
