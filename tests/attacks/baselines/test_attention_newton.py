"""The paper's attack: what its γ does, what a near start gives, and that it claims no more than it can."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from outputs.newton_matrices import GaussNewton
from torch import Tensor

from unmask.attacks.baselines.attention_newton import PaperNewton
from unmask.errors import InputError
from unmask.evidence.outputs import AttentionEvidence
from unmask.recovery import Status

N, D = 4, 8


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def observed(
    seed: int = 0, causal: bool = False, scale: float = 0.5, definite: bool = True, width: int = D
) -> tuple[AttentionEvidence, Tensor]:
    """A layer with a positive definite W (or any), its output, and the input behind it."""
    A, V, X = gaussian(seed, D, D), gaussian(seed + 1, D, width) / math.sqrt(D), gaussian(seed + 2, N, D)
    W = A @ A.T / D**1.5 if definite else A / D
    scores = scale * X @ W @ X.T
    if causal:
        scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    return AttentionEvidence(W, V, scores.softmax(-1) @ X @ V, causal, scale), X


def error(found: Tensor, X: Tensor) -> float:
    return float((found - X).norm() / X.norm())


@pytest.mark.parametrize("causal", [False, True])
def test_without_gamma_a_near_start_is_led_to_the_input(causal):
    evidence, X = observed(causal=causal)
    recovery = PaperNewton(start=X + 1e-4 * gaussian(9, N, D))(evidence)
    assert recovery.status is Status.PARTIAL
    assert "may not be unique" in recovery.reason
    assert recovery.certificate.holds
    assert error(recovery.value.X, X) < 1e-9  # rounding, times the condition number of the layer
    assert recovery.value.values[-1] < recovery.value.values[0]


def test_an_input_that_was_found_is_never_called_a_local_minimum():
    """Where J is nearly singular ∇L is at rounding before c is: some of these 60 layers were said to be minima."""
    for seed in range(0, 200, 10):
        for definite, scale in ((True, 0.5), (False, 0.5), (False, 1.0)):
            evidence, X = observed(seed, scale=scale, definite=definite)
            recovery = PaperNewton(start=X + 1e-6 * gaussian(seed + 9, N, D))(evidence)
            assert recovery.status is Status.PARTIAL, (seed, definite, scale, recovery.reason)
            assert error(recovery.value.X, X) < 1e-6


def test_a_minimum_that_explains_less_is_called_one_and_one_near_rounding_is_not():
    evidence, X = observed(width=2 * D)  # no input explains all of a disturbed output
    noise = gaussian(50, N, 2 * D)
    for level, word in ((0.5, "a local minimum"), (1e-3, "a local minimum"), (1e-11, "near rounding, but not at it")):
        disturbed = replace(evidence, output=evidence.output + level * noise / noise.norm() * evidence.output.norm())
        recovery = PaperNewton(matrix=GaussNewton(), line_search=True, start=X, max_steps=200)(disturbed)
        assert recovery.status is Status.NOTHING_FOUND
        assert word in recovery.reason, recovery.reason


@pytest.mark.parametrize("factor", [0.5, 1e6, 1e30])
def test_an_input_that_is_far_off_never_explains_the_output(factor):
    """A long X̂ rounds more, but not so much that anything passes; nor does X = 0 in half precision."""
    evidence, X = observed()
    for dtype, start in ((torch.float64, factor * X), (torch.bfloat16, 0 * X)):
        rounded = replace(evidence, output=evidence.output.to(dtype))
        recovery = PaperNewton(start=start, max_steps=0)(rounded)
        assert not recovery.certificate.holds
        assert recovery.status is Status.NOTHING_FOUND


def test_a_tiny_gamma_recovers_near_the_start_but_not_to_rounding():
    evidence, X = observed()
    recovery = PaperNewton(gamma=1e-9, start=X)(evidence)
    assert 1e-10 < error(recovery.value.X, X) < 1e-5
    assert recovery.status is Status.NOTHING_FOUND
    assert "γ = 1.0e-09" in recovery.reason


def test_the_papers_gamma_gives_nothing_but_zero():
    evidence, X = observed()
    R = max(float(part.norm()) for part in (evidence.W, evidence.V, evidence.output, X))
    recovery = PaperNewton(gamma=N * D * R**8, start=X)(evidence)
    assert error(recovery.value.X, X) == pytest.approx(1, abs=1e-6)
    assert float(recovery.value.X.norm()) < 1e-6 * float(X.norm())
    assert recovery.status is Status.NOTHING_FOUND
    assert "towards X = 0" in recovery.reason


def test_far_starts_end_with_nothing():
    evidence, X = observed()
    recovery = PaperNewton(start=X + gaussian(9, N, D), max_steps=15)(evidence)
    assert recovery.status is Status.NOTHING_FOUND
    assert "unexplained" in recovery.reason
    assert not recovery.certificate.holds


def test_gauss_newton_with_a_line_search_finds_it_from_the_output():
    evidence, X = observed()
    recovery = PaperNewton(matrix=GaussNewton(), line_search=True)(evidence)
    assert recovery.status is Status.PARTIAL
    assert error(recovery.value.X, X) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_noise_never_yields_recovered(seed):
    evidence, _ = observed(seed)
    noise = gaussian(seed + 50, N, D)
    destroyed = AttentionEvidence(evidence.W, evidence.V, noise * evidence.output.norm() / noise.norm())
    for attack in (PaperNewton(max_steps=15), PaperNewton(matrix=GaussNewton(), line_search=True, max_steps=15)):
        assert attack(destroyed).status in (Status.PARTIAL, Status.NOTHING_FOUND)


def test_it_is_deterministic_and_reports_progress():
    evidence, X = observed()
    attack, seen = PaperNewton(start=X + 1e-4 * gaussian(9, N, D)), []
    first = attack(evidence, lambda stage, done, total: seen.append((stage, done, total)))
    assert torch.equal(first.value.X, attack(evidence).value.X)
    assert seen[0] == ("Newton steps", 0, 50)
    assert first.cost.seconds > 0


def test_a_start_of_another_shape_is_refused():
    evidence, _ = observed()
    with pytest.raises(InputError, match=r"\(4, 8\), got \(3, 8\)"):
        PaperNewton(start=gaussian(0, 3, D))(evidence)
