import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.rational import MOST_HEADS, fit_shifts, fit_sigmoids, sum_of_sigmoids

COPIES = torch.tensor([1, 2, 3, 5, 7, 10, 13, 17, 22, 27, 32, 37, 42, 47, 51, 54, 57, 59, 61, 62, 63])
RHO = COPIES.double() / (64 - COPIES)
ROWS = 48


def random_rows(num_heads, noise=0.0, seed=0, rows=ROWS):
    """Heights of norm about one, shifts between the ratios' logarithms, and values with noise; heads by growing t."""
    generator = torch.Generator().manual_seed(seed)
    c, t, rough = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, num_heads), (rows, num_heads), (rows, len(RHO)))
    )
    t = (2 * t).sort(dim=1).values
    return c, t, sum_of_sigmoids(RHO.log(), c, t) + noise * rough


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
)
def test_sigmoids_of_a_logarithm_are_partial_fractions(heads, ratios):
    """The identity behind token repetition (arXiv 2608.03294)."""
    c, t = torch.tensor(heads, dtype=torch.float64).T
    rho = torch.tensor(ratios, dtype=torch.float64)
    fractions = (c * rho[:, None] / (rho[:, None] + (-t).exp())).sum(1)
    assert torch.allclose(sum_of_sigmoids(rho.log(), c[None], t[None])[0], fractions, atol=1e-12)


# Medians of |t̂ − t|, ten times what was measured; a head costs two to three decades.
@pytest.mark.parametrize(
    ("num_heads", "noise", "allowed"),
    [(1, 0, 2e-14), (2, 0, 5e-13), (3, 0, 1e-11), (1, 6e-8, 2e-6), (2, 6e-8, 3e-5), (3, 6e-8, 5e-4), (1, 1e-3, 3e-2)],
)
def test_heads_are_counted_and_found(num_heads, noise, allowed):
    c, t, values = random_rows(num_heads, noise)
    fit = fit_sigmoids(RHO, values, MOST_HEADS, max(noise, 1e-15))
    assert fit.t.shape == t.shape
    # Of 1,000 rows with three heads and noise of float32, 4 ended in local minima; none of two heads, or without noise.
    assert float(fit.explained.double().mean()) >= (0.95 if num_heads == 3 and noise else 1)
    assert float((fit.t - t).abs().amax(1).median()) <= allowed
    assert float((fit.c - c).abs().amax(1).median()) <= allowed


@pytest.mark.parametrize(("num_heads", "noise"), [(1, 1e-3), (1, 6e-8), (2, 6e-8), (3, 6e-8), (2, 1e-12)])
def test_estimated_errors_are_those_that_happen(num_heads, noise):
    c, t, values = random_rows(num_heads, noise, seed=1)
    fit = fit_sigmoids(RHO, values, num_heads, noise)
    for found, true, error in ((fit.t, t, fit.t_error), (fit.c, c, fit.c_error)):
        ratio = (found - true).abs() / error
        # A Gaussian's median is 0.67 of its standard deviation. Beyond 4 lies 1 in 16,000; rows in which two heads
        # nearly agree are not Gaussian, and are one in twenty.
        assert 0.4 <= float(ratio.median()) <= 1.2
        assert float((ratio < 4).double().mean()) >= 0.9


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.floats(-6, 6))
def test_a_fit_grows_with_its_values(seed, exponent):
    _, _, values = random_rows(2, seed=seed, rows=3)
    scale = 10.0**exponent
    one, other = fit_sigmoids(RHO, values, 2, 1e-15), fit_sigmoids(RHO, scale * values, 2, scale * 1e-15)
    assert one.t.shape == other.t.shape
    assert bool(((one.t - other.t).abs() <= 20 * (one.t_error + other.t_error) + 1e-13).all())


def test_heads_with_equal_shifts_are_one():
    c, t, _ = random_rows(2)
    t[:, 1] = t[:, 0]
    fit = fit_sigmoids(RHO, sum_of_sigmoids(RHO.log(), c, t), MOST_HEADS, 1e-15)
    assert fit.t.shape == (ROWS, 1)
    assert torch.allclose(fit.c[:, 0], c.sum(1), atol=1e-12)


def test_values_of_noise_alone_have_no_head():
    _, _, values = random_rows(0, noise=1e-3)
    fit = fit_sigmoids(RHO, values, MOST_HEADS, 1e-3)
    assert fit.t.shape == (ROWS, 0)
    assert fit.explained.all()


def test_more_heads_than_allowed_are_not_explained():
    _, _, values = random_rows(4)
    fit = fit_sigmoids(RHO, values, MOST_HEADS, 1e-15)
    assert fit.t.shape == (ROWS, MOST_HEADS)
    assert float(fit.explained.double().mean()) < 0.2
    assert (fit.residual[~fit.explained] > 6e-15).all()


def test_values_that_no_sigmoids_make_are_not_explained():
    values = torch.sin(3 * RHO.log())[None].repeat(3, 1)
    assert not fit_sigmoids(RHO, values, MOST_HEADS, 1e-6).explained.any()


def test_an_infinite_ratio_shows_the_sum_of_heights():
    c, t, values = random_rows(2)
    rho = torch.cat([RHO, torch.tensor([torch.inf])])
    fit = fit_sigmoids(rho, torch.cat([values, c.sum(1, keepdim=True)], dim=1), MOST_HEADS, 1e-15)
    assert fit.t.shape == t.shape
    assert float((fit.t - t).abs().amax(1).median()) < 5e-13


def test_known_heights_name_their_heads():
    c, t, _ = random_rows(3)
    t = t.flip(1)  # not by growing t
    found, spread = fit_shifts(RHO, sum_of_sigmoids(RHO.log(), c, t), c)
    assert float((found - t).abs().amax(1).median()) < 1e-12
    assert float(((found - t).abs() <= 100 * 1e-15 * spread + 1e-9).double().mean()) > 0.95


@pytest.mark.parametrize(
    ("rho", "values", "max_heads", "message"),
    [
        (RHO, torch.zeros(2, len(RHO)), 4, "max_heads must be 0 to 3"),
        (RHO, torch.zeros(2, 5), 1, "values"),
        (-RHO, torch.zeros(2, len(RHO)), 1, "positive"),
        (RHO[:4], torch.zeros(2, 4), 2, "5 ratios or more"),
    ],
)
def test_a_callers_mistake_is_told(rho, values, max_heads, message):
    with pytest.raises(InputError, match=message):
        fit_sigmoids(rho, values, max_heads, 1e-12)
