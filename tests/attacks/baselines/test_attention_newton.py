"""The paper's attack: what its γ does, what a near start gives, and that it claims no more than it can."""

from __future__ import annotations

import math

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


def observed(seed: int = 0, causal: bool = False, scale: float = 0.5) -> tuple[AttentionEvidence, Tensor]:
    """A layer with a positive definite W, its output, and the input behind it."""
    A, V, X = gaussian(seed, D, D), gaussian(seed + 1, D, D) / math.sqrt(D), gaussian(seed + 2, N, D)
    W = A @ A.T / D**1.5
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
