"""Factored gradients of many guesses equal torch's own, one by one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tests.benchmarks.rivals import CASES, head_of, padded

from unmask.protocols import observe_gradients

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def matching(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baselines.gradient_matching")


@pytest.fixture(params=CASES)
def case(request, matching):
    make, texts = CASES[request.param]
    model = make().to(dtype=torch.float64)
    client = matching.Client.of_batch(model, head_of(model).double(), texts, [0, 1])
    return client, padded(texts), texts


def test_the_update_is_the_clients(matching, case):
    client, tokens, texts = case
    update = matching.client_update(client, tokens)
    seen = observe_gradients(client.model, texts, task="classification", labels=[0, 1], head=client.head)
    shared = [name for name in update if name in seen.gradients]
    assert len(shared) > 10
    for name in shared:
        torch.testing.assert_close(update[name], seen.gradients[name])


def test_distances_of_many_guesses_are_those_of_each(matching, case):
    client, tokens, _ = case
    update = matching.client_update(client, tokens)
    others = tokens.clone()
    others[client.known < 0] += 1
    x = client.embeddings[torch.stack([tokens, others])]
    update = matching.drop_rounding(update)
    parts = matching.terms(client, update, x)
    slow = [matching.client_update(client, one) for one in (tokens, others)]
    assert len(parts) > 20
    assert {"head", "positions"} < set(parts)
    for name, part in parts.items():
        dense = part.dense()
        for guess, expected in zip(dense, slow, strict=True):
            turned = part.seen.ndim == 2 and part.seen.stride() != update[name].stride()
            torch.testing.assert_close(guess, expected[name].T if turned else expected[name])
        torch.testing.assert_close(part.squares(), dense.square().flatten(1).sum(1))
        torch.testing.assert_close(part.inner(), (dense * part.seen).flatten(1).sum(1))
    cosine = matching.cosine_distance(parts)
    assert cosine[0].abs() < 1e-9
    assert cosine[1] > 0.05
    absolute = matching.absolute_distance(parts, torch.tensor([0.1, 0.1], dtype=torch.float64))
    assert absolute[0] < 1e-9
    assert absolute[1] > 1e-6


@pytest.mark.parametrize("kind", ["cosine", "absolute"])
def test_distances_have_the_slope_that_they_say(matching, case, kind):
    """The Taylor error falls with the square of the step."""
    client, tokens, _ = case
    update = matching.drop_rounding(matching.client_update(client, tokens))
    generator = torch.Generator().manual_seed(0)
    x = client.embeddings[tokens][None]
    x = x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    step = torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def value(at):
        parts = matching.terms(client, update, at, differentiable=True)
        if kind == "cosine":
            return matching.cosine_distance(parts).sum()
        # Absolute values have kinks, which a Taylor series does not see: their slope is compared with torch's below.
        return matching.absolute_distance(parts, torch.zeros(1, dtype=at.dtype), scale=3.0).sum()

    at = x.clone().requires_grad_()
    here = value(at)
    slope = (torch.autograd.grad(here, at)[0] * step).sum()
    errors = [float((value(x + h * step) - here - h * slope).detach().abs()) for h in (1e-3, 5e-4)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_absolute_values_have_torchs_own_slope(matching, case):
    client, tokens, _ = case
    update = matching.client_update(client, tokens)
    x = client.embeddings[tokens][None] + 0.1
    weights = torch.tensor([0.5], dtype=x.dtype)
    at = x.clone().requires_grad_()
    parts = matching.terms(client, update, at, differentiable=True)
    (fast,) = torch.autograd.grad(matching.absolute_distance(parts, weights, 2.0).sum(), at, retain_graph=True)
    away = [2 * (part.dense() - part.seen) for part in parts.values()]
    plain = sum(one.square().sum() + 0.5 * one.abs().sum() for one in away)
    torch.testing.assert_close(fast, torch.autograd.grad(plain, at)[0])


def test_what_is_only_rounding_is_dropped(matching):
    update = {"a": torch.ones(3), "b": torch.full((3,), 1e-9), "c": torch.full((3,), 1e-3)}
    assert set(matching.drop_rounding(update)) == {"a", "c"}


def test_frame_and_padding_are_known_and_words_are_not(matching):
    make, texts = CASES["encoder"]
    model = make()
    client = matching.Client.of_batch(model, head_of(model), texts, [0, 1])
    assert client.known.tolist() == [[1, -1, -1, -1, 2], [1, -1, -1, 2, 0]]
    assert client.mask.sum(1).tolist() == [5, 4]
