"""Planted ranks under planted noise: seen where they can be, never seen where they are not."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.queries.output_layer.logit_spectrum import LogitSpectrum, OutputLayer

RANK, NUM_TOKENS = 20, 150


def planted(num_rows, sigma, seed=0, weakest=1.0):
    """Rows of a fixed space of RANK dimensions plus noise; the last direction is `weakest` as strong as the others."""
    space = torch.randn(RANK, NUM_TOKENS, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    space[-1] *= weakest
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_rows, RANK, generator=generator, dtype=torch.float64)
    return states @ space + sigma * torch.randn(num_rows, NUM_TOKENS, generator=generator, dtype=torch.float64)


def spectrum_of(matrix):
    return LogitSpectrum(matrix, matrix, torch.arange(matrix.shape[1]))


@pytest.mark.parametrize("sigma", [0.0, 1e-6, 1e-2, 0.3])
def test_the_end_is_seen_and_fresh_rows_agree(sigma):
    spectrum = spectrum_of(planted(60, sigma))
    assert spectrum.ends
    assert spectrum.rank == RANK
    certificate = spectrum.certify(planted(48, sigma, seed=1))
    assert certificate.holds
    assert certificate.rejected > certificate.tolerance
    if sigma:
        assert spectrum.sigma == pytest.approx(sigma, rel=0.1)
        # The formula for what fresh rows leave outside is right within a tenth or two.
        assert certificate.residual == pytest.approx(sigma * (60 / 40) ** 0.5, rel=0.2)


def test_fresh_rows_of_another_space_are_not_certified():
    spectrum = spectrum_of(planted(60, 1e-3))
    assert not spectrum.certify(planted(48, 1e-3, seed=1).roll(7, dims=1)).holds
    assert not spectrum.certify(planted(48, 3.0, seed=1)).holds


def test_too_few_rows_show_no_end():
    for num_rows in (16, 20, 30):
        assert not spectrum_of(planted(num_rows, 1e-6)).ends


def test_a_direction_below_the_noise_is_not_counted():
    spectrum = spectrum_of(planted(60, 0.1, weakest=1e-3))
    assert spectrum.rank == RANK - 1
    certificate = spectrum.bound()
    assert certificate.holds
    assert spectrum.values[RANK - 1] < certificate.residual < spectrum.values[RANK - 2]


def test_noise_and_nothing_have_no_rank():
    assert spectrum_of(torch.randn(60, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).rank == 0
    assert spectrum_of(torch.zeros(60, 150, dtype=torch.float64)).rank == 0
    assert spectrum_of(torch.zeros(60, 0, dtype=torch.float64)).rank == 0


def test_a_steep_slope_is_not_an_end():
    """Singular values that fall by a factor each: every fall is large, none stands out."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 60, generator=generator, dtype=torch.float64))[0] for n in (60, 150))
    assert not spectrum_of(left @ torch.diag(1.5 ** -torch.arange(60.0).double()) @ right.T).ends


def test_the_layer_spans_what_was_planted():
    layer = spectrum_of(planted(60, 1e-9)).layer(True)
    assert (layer.hidden_size, layer.affine_size, layer.W.shape) == (RANK, RANK, (NUM_TOKENS, RANK))
    rows = planted(5, 0.0, seed=3)
    rows = rows - rows.mean(1, keepdim=True)
    left = rows.T - layer.W @ torch.linalg.lstsq(layer.W, rows.T).solution
    assert float(left.norm() / rows.norm()) < 1e-8


def test_an_unknown_layer_says_so():
    assert OutputLayer.unknown().describe() == "the hidden size is at least 0"
    assert spectrum_of(planted(60, 1e-9)).layer(False).describe() == f"the hidden size is at least {RANK}"
