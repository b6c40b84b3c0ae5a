"""The hash of a model's weights."""

from __future__ import annotations

import pytest
import torch

from unmask.models.fingerprint import fingerprint_of

WEIGHTS = {"a": torch.arange(200.0), "b": torch.ones(3, 4)}


def test_the_order_of_parameters_does_not_matter():
    assert fingerprint_of("bert", WEIGHTS.items()) == fingerprint_of("bert", reversed(WEIGHTS.items()))


def test_float_types_do_not_matter():
    rounded = {name: weights.bfloat16() for name, weights in WEIGHTS.items()}
    assert fingerprint_of("bert", rounded.items()) == fingerprint_of("bert", WEIGHTS.items())


@pytest.mark.parametrize(
    "other",
    [
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"], "b": WEIGHTS["b"].T},
        {"a": WEIGHTS["a"], "b": 2 * WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
    ],
    ids=["name", "shape", "weights", "missing"],
)
def test_whatever_differs_shows(other):
    assert fingerprint_of("bert", other.items()) != fingerprint_of("bert", WEIGHTS.items())


def test_families_differ():
    assert fingerprint_of("bert", WEIGHTS.items()) != fingerprint_of("gpt2", WEIGHTS.items())
