"""Known norms of the rows: derivatives, starts, indefinite layers that are recovered, and norms that are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.attacks.outputs.attention_layers import gaussian, random_layer
from tests.sampling import in_turn, sample

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.known_norms import (
    NUM_AFTER,
    NormedProblem,
    norm_error,
    normed_starts,
    polish,
    search_with_norms,
)
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.attacks.recover import recover_inputs
from unmask.evidence.outputs import AttentionEvidence
from unmask.recovery import Status
from unmask.scores.inputs import relative_error

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


def normed_layer(*about, **more) -> tuple[AttentionEvidence, torch.Tensor]:
    evidence, X = random_layer(*about, **more)
    return replace(evidence, row_norms=X.norm(dim=1)), X


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_jacobians_are_those_of_the_residuals_and_vanish_at_the_input():
    evidence, X = normed_layer("gauss", 3, 5)
    problem = pose(evidence).problem()
    normed = NormedProblem(problem, evidence.row_norms)
    x = problem.flat(X)
    assert normed.residuals(x[None]).norm() < 1e-13
    expected = torch.func.jacrev(lambda x: normed.residuals(x[None])[0])(x + 0.1)
    assert torch.allclose(normed.jacobians((x + 0.1)[None])[0], expected, atol=1e-12)


def test_starts_have_the_norms_and_are_reproducible():
    evidence, _ = normed_layer("gauss", 6, 8)
    problem = pose(evidence).problem()
    starts = normed_starts(problem, evidence.row_norms, 10, generator())
    assert torch.equal(starts, normed_starts(problem, evidence.row_norms, 10, generator()))
    norms = starts.reshape(10, *problem.Y.shape).norm(dim=2)
    assert torch.allclose(norms, evidence.row_norms.expand_as(norms))


def test_the_first_order_is_nearer_than_noise():
    """Median relative distance from the input over eight layers: what makes it a start."""
    pairs = []
    for seed in range(8):
        evidence, X = normed_layer("gauss", 8, 16, 0.3, seed)
        problem = pose(evidence).problem()
        starts = normed_starts(problem, evidence.row_norms, 2, generator())
        pairs.append([relative_error(problem.lift(start), X) for start in starts])
    linear, noise = torch.tensor(pairs).median(0).values
    assert linear < 0.5 < 1 < noise


@sample("n, d", [(4, 8), (8, 16), (12, 24)], [(4, 8), (8, 16)])
def test_indefinite_layers_are_recovered(n, d):
    evidence, X = normed_layer("gauss", n, d)
    recovery = recover_inputs(evidence)
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) < 1e-8
    assert "not proved" in recovery.reason
    assert "under the weights given" in recovery.certificate.claim


def test_a_causal_indefinite_layer_is_recovered():
    evidence, X = normed_layer("gauss", 5, 10, causal=True)
    recovery = recover_inputs(evidence)
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) < 1e-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["pd", "gauss"])
def test_norms_of_another_input_refuse_every_preimage(family, causal):
    evidence, _ = normed_layer(family, 3, 6, causal=causal)
    wrong = replace(evidence, row_norms=1.01 * evidence.row_norms)
    recovery = recover_inputs(wrong)
    assert recovery.status in (Status.NOTHING_FOUND, Status.BUDGET_EXHAUSTED)


@sample("family, size", product(["pd", "gauss"], [1e-4, 1.0]), in_turn(["pd", "gauss"], [1e-4, 1.0]))
def test_noise_shows_although_v_is_square(family, size):
    """The negative control: without norms every matrix is the output of a definite layer."""
    evidence, _ = normed_layer(family, 4, 8)
    noise = gaussian(7, *evidence.output.shape)
    noise = size * noise * float(evidence.output.norm() / noise.norm())
    recovery = recover_inputs(replace(evidence, output=evidence.output + noise))
    assert recovery.status is not Status.RECOVERED


def test_outputs_and_norms_in_float32():
    evidence, X = normed_layer("pd", 4, 8)
    coarse = {name: getattr(evidence, name).float() for name in ("W", "V", "output", "row_norms")}
    recovery = AttentionAttack()(replace(evidence, **coarse))
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) < 1e-4


def test_a_search_looks_for_a_second_root_and_counts_what_it_tried():
    evidence, X = normed_layer("pd", 4, 8)
    problem = pose(evidence).problem()
    tolerance = 1e-12 * float(problem.Y.norm())
    options = {"tolerance": tolerance, "max_steps": 60}
    search = search_with_norms(problem, evidence.row_norms, num_starts=64, generator=generator(), **options)
    assert 8 + NUM_AFTER < search.num_starts < 64
    assert len(search.roots) == 1
    known = search_with_norms(
        problem, evidence.row_norms, known=search.roots, num_starts=64, generator=generator(), **options
    )
    assert known.num_starts == search.num_starts - 8
    assert 0 < known.num_converged <= known.num_starts
    assert norm_error(problem.lift(search.roots[0]), evidence.row_norms) < 1e-9
    assert polish(problem, problem.flat(X) + 1e-3, tolerance) is not None
    none = search_with_norms(problem, 2 * evidence.row_norms, num_starts=16, generator=generator(), **options)
    assert (none.roots, none.num_starts, none.num_converged) == ((), 16, 0)
