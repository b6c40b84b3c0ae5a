"""The system of one attention layer: elimination of V, reduction, derivatives, and what a definite W implies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw
from tests.attacks.outputs.attention_layers import gaussian, random_layer, scores_matrix

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, pose
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=25)
seeds = st.integers(0, 10**6)


@quick
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_theorem_reduction_the_input_lies_in_the_row_space_of_the_output(seed, n, d, extra, causal):
    evidence, X = random_layer("gauss", n, d, 1.0, seed, causal=causal, e=d + extra)
    posed = pose(evidence)
    problem = posed.problem()
    assert problem.size == n * min(n, d)
    assert problem.is_exact
    # κ(V) and κ(F) of small random matrices: up to 1e4 each
    assert torch.allclose(problem.lift(problem.flat(X)), X, atol=1e-6)
    assert float(problem.residuals(problem.flat(X)[None]).norm()) <= 1e-9 * float(problem.Y.norm())
    assert posed.residual(X) <= 1e-12
    assert posed.off_range <= 1e-11


def test_equal_tokens_make_the_reduction_inexact():
    evidence, X = random_layer("pd", 4, 8)
    X = X[[0, 1, 2, 2]]
    output = AttentionMap(evidence.W)(X) @ evidence.V
    problem = pose(AttentionEvidence(evidence.W, evidence.V, output)).problem()
    assert problem.Y.shape == (4, 3)
    assert not problem.is_exact


@pytest.mark.parametrize("causal", [False, True])
def test_jacobians_of_a_batch_are_those_of_its_points_and_of_autograd(causal):
    problem = AttentionProblem(scores_matrix("pdskew", 3, 1.0, 0), gaussian(1, 4, 3), torch.eye(3).double(), causal)
    xs = gaussian(2, 5, 12)
    batch = problem.jacobians(xs)
    for x, J in zip(xs, batch, strict=True):
        expected = torch.func.jacrev(lambda x: problem.residuals(x[None])[0])(x)
        assert torch.allclose(J, expected, atol=1e-12)
        assert torch.allclose(problem.jacobian(x), expected, atol=1e-12)
        linear = problem.linearise(x)
        u = gaussian(3, 12)
        assert torch.allclose(linear.jvp(u), expected @ u, atol=1e-12)
        mixed = (problem.map.weights(x.reshape(4, 3)) @ linear.precondition(u).reshape(4, 3)).reshape(-1)
        assert torch.allclose(mixed, u, atol=1e-9)


@quick
@given(
    seeds, st.integers(1, 8), st.integers(1, 6), st.floats(0.1, 10), st.sampled_from(["pd", "pdskew"]), st.booleans()
)
def test_theorem_degree_the_energy_of_a_definite_layer_grows_with_its_input(seed, n, d, sharpness, family, causal):
    """⟨X, Φ(X)Wᵀ⟩ ≥ λ_min‖X‖² − n·ω, ω = W₀((n − 1)/e) ≤ log n: no pre-image is far away, and the degree is 1."""
    W, X = scores_matrix(family, d, sharpness, seed), gaussian(seed + 7, n, d)
    mixed = AttentionMap(W, causal)(X)
    energies = (X @ W * mixed).sum(dim=1)  # x_iᵀ W x̄_i
    own = (X @ W * X).sum(dim=1)
    omega = float(lambertw((n - 1) / math.e).real)
    assert omega <= math.log(n) + 1e-12
    assert bool((energies >= own - omega - 1e-9 * own.abs()).all())
    least = float(torch.linalg.eigvalsh((W + W.mT) / 2)[0])
    assert float(energies.sum()) >= least * float(X.square().sum()) - n * omega - 1e-9 * float(own.abs().sum())


def test_definiteness_is_that_of_the_symmetric_part_on_the_row_space():
    evidence, _ = random_layer("pdskew", 4, 8)
    assert pose(evidence).problem().is_definite
    evidence, _ = random_layer("gauss", 4, 8)
    assert not pose(evidence).problem().is_definite


def test_scale_is_part_of_W():
    evidence, _ = random_layer("pd", 3, 5)
    scaled = AttentionEvidence(2 * evidence.W, evidence.V, evidence.output, scale=0.5)
    assert torch.equal(pose(scaled).W, pose(evidence).W)


def test_rank_of_V_is_seen():
    evidence, _ = random_layer("pd", 3, 5)
    V = evidence.V.clone()
    V[4] = V[3]
    assert pose(AttentionEvidence(evidence.W, V, evidence.output)).value_rank == 4
    assert pose(AttentionEvidence(evidence.W, V[:, :2], evidence.output[:, :2])).value_rank == 2


def test_noise_outside_the_row_space_of_V_is_measured():
    evidence, _ = random_layer("pd", 3, 4, e=7)
    noise = 1e-3 * gaussian(5, 3, 7)
    noisy = AttentionEvidence(evidence.W, evidence.V, evidence.output + noise)
    assert 1e-5 < pose(noisy).off_range < 1e-2
