"""Defences of stored embeddings: what each keeps and hides, and the budget of the private one."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm

from unmask.defences.vectors import add_private_noise, cut_dimensions, keep_signs, private_sigma, rotate_secretly
from unmask.errors import InputError
from unmask.evidence import VectorEvidence
from unmask.models.pooling import EmbeddingRecipe

UNITS = torch.nn.functional.normalize(torch.randn(40, 64, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def evidence() -> VectorEvidence:
    return VectorEvidence(UNITS, EmbeddingRecipe(), "model", half_steps=torch.full_like(UNITS, 0.01))


def test_a_cut_is_told_by_the_recipe(evidence):
    cut = cut_dimensions(evidence, 16)
    assert torch.equal(cut.vectors, UNITS[:, :16])
    assert (cut.recipe.dimensions, cut.recipe.renormalise, cut.half_steps) == (16, False, None)
    again = cut_dimensions(evidence, 16, renormalise=True)
    assert torch.allclose(again.vectors.norm(dim=1), torch.ones(40))
    assert again.recipe.renormalise
    assert cut_dimensions(evidence, 64) is evidence
    with pytest.raises(InputError, match="dimensions must be at most 64"):
        cut_dimensions(evidence, 65)


def test_signs_are_two_values(evidence):
    coded = keep_signs(evidence)
    signs = coded.vectors
    assert torch.allclose(signs.abs(), torch.full_like(signs, 1 / 8))
    assert torch.equal(signs > 0, UNITS >= 0)
    assert coded.same_code(3, UNITS).tolist() == [number == 3 for number in range(40)]


def test_a_rotation_keeps_angles_and_is_one_for_all(evidence):
    turned = rotate_secretly(evidence, torch.Generator().manual_seed(1)).vectors
    assert torch.allclose(turned @ turned.T, UNITS @ UNITS.T, atol=1e-5)
    assert float((turned - UNITS).norm(dim=1).min()) > 0.5
    other = rotate_secretly(evidence, torch.Generator().manual_seed(2)).vectors
    assert not torch.allclose(turned, other, atol=0.1)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-5), (100.0, 1e-5)])
def test_balle_wang_theorem_8(epsilon, delta):
    """At the standard deviation that is given the condition holds with equality; below it does not hold."""

    def spent(sigma):
        shift = epsilon * sigma / 2
        return norm.cdf(1 / sigma - shift) - math.exp(epsilon + norm.logcdf(-1 / sigma - shift))

    sigma = private_sigma(epsilon, delta)
    assert spent(sigma) == pytest.approx(delta, rel=1e-3)
    assert spent(0.99 * sigma) > delta
    if epsilon <= 1:  # the classical bound is looser
        assert sigma < 2 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def test_private_noise_has_its_size_and_clips(evidence):
    long = VectorEvidence(7 * UNITS, EmbeddingRecipe(normalise=False), "model")
    for seen in (evidence, long):
        noise = add_private_noise(seen, 8.0, 1e-5, torch.Generator().manual_seed(0)).vectors - UNITS
        assert float(noise.std()) == pytest.approx(private_sigma(8.0, 1e-5), rel=0.05)


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1)])
def test_a_budget_that_is_none_is_refused(epsilon, delta):
    with pytest.raises(InputError, match="a budget needs"):
        private_sigma(epsilon, delta)
