"""Position by position: the two-token theorem, rows, branches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.attacks.outputs.attention_layers import gaussian, random_layer

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.causal_search import RowProblem, search_branches, solve_row, two_token_shares
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Status
from unmask.scores.inputs import relative_error

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=50)
seeds = st.integers(0, 10**6)


def height(g: float, a: float, b: float) -> float:
    return math.log(g) + a * (1 + g) + b * (1 + g) ** 2


@quick
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_theorem_two_tokens_roots_are_roots_and_their_number_has_the_right_parity(a, b):
    assume(abs(b) > 1e-6)
    shares = two_token_shares(a, b)
    for g in shares:
        # rounding of log g and of the terms, each times its size
        assert abs(height(g, a, b)) <= 1e-9 * (1 + abs(math.log(g)) + abs(a) * (1 + g) + abs(b) * (1 + g) ** 2)
    assert len(shares) <= 3
    assert len(shares) % 2 == (1 if b > 0 else 0)


@quick
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_theorem_two_tokens_no_root_is_missed(a, b):
    """A fine scan of the axis sees no change of sign that has no root."""
    assume(abs(b) > 1e-6)
    grid = [math.exp(u / 20) for u in range(-600, 601)]
    signs = [height(g, a, b) > 0 for g in grid]
    changes = [(low, high) for low, high, s, t in zip(grid, grid[1:], signs, signs[1:], strict=False) if s != t]
    shares = two_token_shares(a, b)
    assert all(any(low <= g <= high for g in shares) for low, high in changes)


@settings(max_examples=300)
@given(*(st.tuples(st.floats(1, 10), st.integers(-320, 100), st.sampled_from([-1, 0, 1])) for _ in range(2)))
def test_theorem_two_tokens_no_slope_is_too_flat_or_too_steep(a, b):
    """Turning points may lie where squares of g overflow: a layer whose scores are all but equal."""
    first, second = (sign * digits * float(f"1e{power}") for digits, power, sign in (a, b))
    shares = two_token_shares(first, second)
    assert all(0 <= g < math.inf for g in shares)


def attend(W: torch.Tensor, V: torch.Tensor, X: torch.Tensor) -> AttentionEvidence:
    return AttentionEvidence(W, V, AttentionMap(W, causal=True)(X) @ V, causal=True)


def test_a_layer_whose_scores_are_all_but_equal():
    """An OverflowError: the turning point lies at g = 1e160, whose square is no number."""
    assert two_token_shares(-1e-160, 0.0) == pytest.approx([1.0])
    X = gaussian(1, 2, 3)
    recovery = AttentionAttack()(attend(1e-160 * gaussian(2, 3, 3), gaussian(3, 3, 3), X))
    assert any(relative_error(preimage.X, X) < 1e-8 for preimage in recovery.value.preimages)


def test_a_token_that_sees_only_itself_is_not_missed():
    """Its root lies at g = e⁻¹⁴⁹³; without it another pre-image was 'the only one, proved by enumeration'."""
    assert two_token_shares(1000.0, 493.0) == [0.0]
    W, X = -torch.eye(2, dtype=torch.float64), torch.tensor([[40.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    recovery = AttentionAttack()(attend(W, torch.eye(2, dtype=torch.float64), X))
    assert any(relative_error(preimage.X, X) < 1e-8 for preimage in recovery.value.preimages) or (
        recovery.status is not Status.RECOVERED
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_token_that_does_not_see_itself_is_never_recovered(seed):
    """Its row is the first token to the last digit, and so it would be for many others."""
    S = gaussian(seed, 3, 3)
    W = S @ S.mT + 0.1 * torch.eye(3, dtype=torch.float64)
    X = torch.stack([gaussian(seed + 100, 3), torch.zeros(3, dtype=torch.float64)])
    X[1] = X[0] * 0.5
    W = W * (400 / float(X[0] @ W @ X[0]))  # the second token looks at the first one e¹⁰⁰ times as much as at itself
    recovery = AttentionAttack()(attend(W, gaussian(seed + 200, 3, 3), X))
    assert recovery.status is not Status.RECOVERED
    assert recovery.status is not Status.PARTIAL or "too little to be seen" in recovery.reason


def test_a_repeated_token_is_recovered_where_none_can_hide():
    W = torch.eye(3, dtype=torch.float64)
    X = gaussian(5, 1, 3).expand(2, -1).contiguous()
    recovery = AttentionAttack()(attend(W, gaussian(6, 3, 3), X))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert relative_error(recovery.value.X, X) < 1e-8


@quick
@given(seeds, st.sampled_from([1.0, 3.0]), st.integers(2, 6))
def test_theorem_two_tokens_an_indefinite_difference_has_exactly_two_preimages(seed, sharpness, d):
    evidence, X = random_layer("gauss", 2, d, sharpness, seed, causal=True)
    problem = pose(evidence).problem()
    delta = problem.Y[1] - problem.Y[0]
    b = float(delta @ problem.W @ delta)
    assume(abs(b) > 1e-3)
    found = solve_row(problem.W, problem.Y[:1], problem.Y[1], 1e-13, 8, torch.Generator())
    assert found.enumerated
    assert len(found.inputs) == 2 if b < 0 else len(found.inputs) in (1, 3)
    errors = [relative_error(problem.lift(torch.stack([problem.Y[0], x]).reshape(-1)), X) for x in found.inputs]
    # κ of the root: p and its neighbour may be close, where half of the digits are lost
    assert min(errors) < 1e-5


@pytest.mark.parametrize("family", ["pd", "gauss"])
def test_the_rows_jacobian_is_autograds(family):
    evidence, X = random_layer(family, 5, 4, causal=True)
    row = RowProblem(evidence.W, X[:4], gaussian(9, 4), torch.eye(4).double())
    cs = gaussian(8, 3, 4)
    for c, J in zip(cs, row.jacobians(cs), strict=True):
        assert torch.allclose(J, torch.func.jacrev(lambda c: row.residuals(c[None])[0])(c), atol=1e-12)
        assert torch.allclose(row.jacobian(c), J, atol=1e-12)


@quick
@given(seeds, st.sampled_from(["pd", "gauss"]))
def test_the_true_row_solves_its_equation(seed, family):
    evidence, X = random_layer(family, 5, 6, seed=seed, causal=True)
    y = AttentionMap(evidence.W, causal=True)(X)[4]
    directions = torch.linalg.qr((y - X[:4]).mT)[0]
    row = RowProblem(evidence.W, X[:4], y, directions)
    c = (X[4] - y) @ directions
    assert torch.allclose(row.inputs(c[None])[0], X[4], atol=1e-6)
    assert float(row.residuals(c[None]).norm()) < 1e-10


def test_a_row_that_repeats_the_only_earlier_token_is_that_token():
    W, x = gaussian(0, 3, 3), gaussian(1, 3)
    found = solve_row(W, x[None], x, 1e-12, 8, torch.Generator())
    assert found.enumerated
    assert torch.equal(torch.stack(found.inputs), x[None])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_branches_of_an_indefinite_layer_hold_the_input_and_all_are_exact(seed):
    evidence, X = random_layer("gauss", 4, 8, seed=seed, causal=True)
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.PARTIAL
    assert min(relative_error(preimage.X, X) for preimage in recovery.value.preimages) < 1e-8
    assert all(preimage.residual < 1e-10 for preimage in recovery.value.preimages)


@pytest.mark.parametrize("family", ["pd", "pdskew"])
def test_a_definite_layer_of_32_tokens_is_recovered(family):
    evidence, X = random_layer(family, 32, 64, causal=True)
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) < 1e-8


def test_the_budget_ends_the_search_and_says_so():
    evidence, _ = random_layer("gauss", 6, 12, causal=True)
    problem = pose(evidence).problem()
    branches = search_branches(
        problem, tolerance=1e-11, num_starts=8, max_nodes=2, generator=torch.Generator().manual_seed(0)
    )
    assert branches.budget_ended
    assert branches.num_nodes == 2
    assert AttentionAttack(max_nodes=2)(evidence).status is Status.BUDGET_EXHAUSTED


def test_solutions_far_from_the_output_are_found():
    """A token that hardly sees itself (f = 0.07) is far from its row of the output; starts near that row miss it."""
    generator = torch.Generator().manual_seed(5003)
    A, K, _, X = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(4))
    attention = AttentionMap(A @ A.T / 3**1.5 + (K - K.T) / 3, causal=True)
    assert float(attention.weights(X)[2, 2]) < 0.07
    found = solve_row(attention.W, X[:2], attention(X)[2], 1e-13, 48, torch.Generator().manual_seed(0))
    assert len(found.inputs) == 3
    assert min(float((root - X[2]).norm()) for root in found.inputs) < 1e-8


def test_a_row_that_no_input_gives_is_a_dead_end():
    """W = −5·I, y_1 = e_1, y_2 = 2e_1: a = b = −5, and log g − 5(1 + g) − 5(1 + g)² is below 0 everywhere."""
    eye = torch.eye(2, dtype=torch.float64)
    output = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    assert two_token_shares(-5.0, -5.0) == []
    recovery = AttentionAttack()(AttentionEvidence(-5 * eye, eye, output, causal=True))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
