"""Distances to a noisy span: about zero for its own vectors at any noise, several units for others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.linalg.noisy_span import NoisySpan
from unmask.linalg.whitening import whiten

D, M, RANK = 80, 200, 15


def noisy(sigma: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(RANK, D, generator=generator, dtype=torch.float64)
    signal = rows.T @ torch.randn(RANK, M, generator=generator, dtype=torch.float64)
    return rows, signal + sigma * torch.randn(D, M, generator=generator, dtype=torch.float64)


@settings(max_examples=15)
@given(seed=st.integers(0, 999), sigma=st.sampled_from([1e-6, 1e-3, 1e-1, 0.5]))
def test_vectors_of_the_span_have_no_excess_and_others_do(seed, sigma):
    rows, matrix = noisy(sigma, seed)
    span = NoisySpan.of(whiten([matrix]), torch.float64)
    assert span.rank == RANK
    assert float(span.excess(rows).max()) < 1.0
    others = torch.randn(50, D, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assert float(span.excess(others).min()) > 2.0


def test_scaling_rows_by_their_noise_leaves_distances_alone():
    rows, matrix = noisy(0.0)
    sigmas = torch.linspace(0.01, 0.5, D, dtype=torch.float64)
    noise = sigmas[:, None] * torch.randn(D, M, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    span = NoisySpan.of(whiten([matrix + noise], [sigmas.square()[:, None].expand(D, M)]), torch.float64)
    assert float(span.excess(rows).max()) < 1.0


@pytest.mark.parametrize("shape", [(80, 200), (80, 40)])
def test_noise_alone_has_no_directions(shape):
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert NoisySpan.of(whiten([noise])).rank <= 1


@pytest.mark.parametrize(("d", "m"), [(60, 200), (100, 100), (200, 60)], ids=["wide", "square", "tall"])
def test_rows_of_the_span_are_as_far_as_noise_leaves_them(d, m):
    generator = torch.Generator().manual_seed(0)
    rows, sent = (torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (d, m))
    gradient = rows.T @ sent + 0.02 * torch.randn(d, m, generator=generator, dtype=torch.float64)
    far, left = NoisySpan.of(whiten([gradient]), torch.float64).squares(rows)
    assert 0.5 < float(far.sum() / left.sum()) < 2


def test_the_plain_span_has_the_same_distances():
    rows, matrix = noisy(0.02)
    span = NoisySpan.of(whiten([matrix]), torch.float64)
    distances = span.as_span().distance(rows)
    torch.testing.assert_close(distances.square(), span.squares(rows)[0], atol=1e-12, rtol=1e-6)
    assert span.as_span().rank == RANK


def test_a_span_in_float32_says_the_same():
    rows, matrix = noisy(0.1)
    span = NoisySpan.of(whiten([matrix]), torch.float64)
    for exact, single in zip(span.squares(rows), span.to(torch.float32).squares(rows), strict=True):
        torch.testing.assert_close(single.double(), exact, rtol=1e-3, atol=1e-6)
