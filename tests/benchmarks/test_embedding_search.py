"""Starts, steps and rounding that TAG and LAMP share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tests.benchmarks.rivals import CASES, head_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baselines.embedding_search")


@pytest.fixture
def client(search):
    make, texts = CASES["encoder"]
    model = make()
    return search.Client.of_batch(model, head_of(model), texts, [0, 1])


def test_the_frame_stays_and_rounding_is_exact_on_embeddings(search, client):
    starts = search.random_starts(client, 3, torch.Generator().manual_seed(0))
    assert starts.shape == (3, 2, 5, client.model.width)
    torch.testing.assert_close(starts[:, 0, 0], client.embeddings[1].expand(3, -1))
    tokens = torch.tensor([[[1, 7, 9, 11, 2], [1, 8, 12, 2, 0]]])
    x = client.embeddings[tokens]
    assert search.nearest_tokens(client, 3 * x).tolist() == tokens.tolist()
    torch.testing.assert_close(search.rounded(client, x, tokens), x)
    assert search.read_texts(client, tokens[0]) == [(1, 7, 9, 11, 2), (1, 8, 12, 2)]


def test_steps_are_adams_and_every_start_has_its_own_rate(search, client):
    start = search.random_starts(client, 2, torch.Generator().manual_seed(0))
    wanted = start + 1

    def loss_of(x):
        return (x - wanted).square().mean((1, 2, 3))

    descent = search.Descent(client, start, torch.tensor([0.1, 0.01]), decay=1.0, loss_of=loss_of)

    plain = start.clone()
    for row, rate in enumerate((0.1, 0.01)):
        one = start[row].clone().requires_grad_()
        optimizer = torch.optim.Adam([one], lr=rate)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(torch.stack([one, one]))[row].backward()
            one.grad *= client.unknown[..., None]
            optimizer.step()
        plain[row] = one.detach()
    losses = [descent.step() for _ in range(5)]
    torch.testing.assert_close(descent.x, plain, rtol=1e-4, atol=1e-6)
    assert (losses[-1] < losses[0]).all()
    torch.testing.assert_close(descent.best_loss, losses[-1])
