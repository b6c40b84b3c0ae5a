"""The attack on one attention layer: recovery, all pre-images, honest endings, controls."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.outputs.attention_layers import gaussian, random_layer
from tests.sampling import sample

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Recovery, Status
from unmask.scores.inputs import relative_error

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

RIGHT = 1e-8  # the contract; residuals of 1e-15 times 1/σ_min(J), which is below 1e4 in these problems
few = settings(max_examples=8)
seeds = st.integers(0, 10**6)


def errors(recovery: Recovery, X: torch.Tensor) -> list[float]:
    return [relative_error(preimage.X, X) for preimage in recovery.value.preimages]


def definite_problems(per_kind: int, sizes: tuple[tuple[int, int], ...], causal: bool = False):
    for n, d in sizes:
        for family in ("pd", "pdskew"):
            for sharpness in (1.0, 3.0):
                for seed in range(per_kind):
                    yield random_layer(family, n, d, sharpness, seed, causal=causal)


def share_found_from_the_output(problems) -> float:
    """How often X₀ = Y alone, without any random number, leads to the input, certified."""
    found = []
    for evidence, X in problems:
        recovery = AttentionAttack(num_starts=0, num_large_starts=0)(evidence)
        assert recovery.status is not Status.RECOVERED  # nothing was searched
        first = recovery.value.preimages[:1]
        found.append(bool(first) and first[0].certified and relative_error(first[0].X, X) <= RIGHT)
    return sum(found) / len(found)


def test_definite_layers_are_recovered_from_their_output_alone():
    assert share_found_from_the_output(definite_problems(1, ((4, 16), (8, 32), (16, 32)))) >= 0.9


@pytest.mark.slow
def test_definite_layers_are_recovered_from_their_output_alone_100_problems():
    sizes = ((4, 16), (8, 16), (8, 32), (16, 32), (32, 64))
    assert share_found_from_the_output(definite_problems(5, sizes)) >= 0.95


@sample("family, sharpness", [("pd", 1.0), ("pd", 3.0), ("pdskew", 1.0)], [("pd", 3.0)])
def test_a_definite_layer_of_32_tokens_is_recovered(family, sharpness):
    evidence, X = random_layer(family, 32, 64, sharpness)
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.holds
    assert relative_error(recovery.value.X, X) <= RIGHT


@pytest.mark.slow
def test_256_tokens_are_recovered_without_matrices():
    evidence, X = random_layer("pd", 256, 128, 3.0)
    recovery = AttentionAttack(num_large_starts=24)(evidence)
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) <= RIGHT


@few
@given(seeds, st.sampled_from(["pd", "pdskew", "gauss"]), st.sampled_from([1.0, 3.0]), st.integers(1, 4))
def test_recovered_is_the_input_and_every_certified_preimage_gives_the_output(seed, family, sharpness, n):
    evidence, X = random_layer(family, n, 5, sharpness, seed)
    recovery = AttentionAttack(num_starts=24)(evidence)
    for preimage in recovery.value.preimages:
        again = AttentionMap(evidence.W)(preimage.X) @ evidence.V
        assert relative_error(again, evidence.output) <= recovery.certificate.tolerance
    if recovery.status is Status.RECOVERED:
        assert errors(recovery, X) == [pytest.approx(0, abs=RIGHT)]
        assert recovery.value.definite or n == 1


def false_recoveries(
    sizes: tuple[tuple[int, int], ...], per_kind: int, num_starts: int, causal: bool
) -> tuple[Counter[str], int]:
    """How often RECOVERED is said, and how often a thorough search finds another pre-image all the same."""
    said: Counter[str] = Counter()
    wrong = 0
    thorough = AttentionAttack(num_starts=num_starts, num_row_starts=num_starts, max_steps=120, seed=1)
    for evidence, X in definite_problems(per_kind, sizes, causal):
        recovery = AttentionAttack()(evidence)
        said[recovery.status.name] += 1
        if recovery.status is Status.RECOVERED:
            wrong += len(thorough(evidence).value) != 1 or relative_error(recovery.value.X, X) > RIGHT
    return said, wrong


@pytest.mark.parametrize("causal", [False, True])
def test_recovered_is_not_said_where_a_second_preimage_exists(causal):
    said, wrong = false_recoveries(((2, 2), (3, 3), (3, 6)), 2, num_starts=100, causal=causal)
    assert wrong == 0
    assert said["RECOVERED"] >= 14  # the rule is of use: most definite layers have one pre-image


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_recovered_is_not_said_where_a_second_preimage_exists_200_problems(causal):
    _, wrong = false_recoveries(((2, 2), (3, 3), (3, 6), (4, 4), (4, 8)), 10, num_starts=400, causal=causal)
    assert wrong == 0


def test_indefinite_layers_are_never_called_recovered_and_the_input_is_mostly_among_the_preimages():
    among = []
    for seed in range(8):
        evidence, X = random_layer("gauss", 3, 6, 1.0, seed)
        recovery = AttentionAttack()(evidence)
        assert recovery.status in (Status.PARTIAL, Status.NOTHING_FOUND)
        assert recovery.certificate.details.get("num_preimages", 0) == len(recovery.value)
        among.append(min(errors(recovery, X), default=1.0) <= RIGHT)
    assert sum(among) >= 5  # 3 tokens: nearly always, `benchmarks/run.py outputs indefinite`


def test_several_preimages_are_all_returned_and_are_different():
    """Two tokens, causal, δᵀWδ < 0: exactly two."""
    for seed in range(20):
        evidence, X = random_layer("gauss", 2, 4, 1.0, seed, causal=True)
        problem = pose(evidence).problem()
        delta = problem.Y[1] - problem.Y[0]
        if float(delta @ problem.W @ delta) < -1e-3:
            break
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.PARTIAL
    assert len(recovery.value) == 2
    assert "2 distinct exact pre-images" in recovery.reason
    assert min(errors(recovery, X)) <= RIGHT
    first, second = recovery.value.preimages
    assert relative_error(first.X, second.X) > 1e-3


def test_one_token_is_read_off():
    evidence, X = random_layer("gauss", 1, 6)
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.RECOVERED
    assert "proved" in recovery.certificate.claim
    assert relative_error(recovery.value.X, X) <= RIGHT


# What V loses, what noise does


@pytest.mark.parametrize("columns", [5, 7])
def test_a_value_matrix_that_loses_directions_is_refused(columns):
    evidence, _ = random_layer("pd", 4, 8)
    cut = AttentionEvidence(evidence.W, evidence.V[:, :columns], evidence.output[:, :columns])
    recovery = AttentionAttack()(cut)
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert f"rank {columns} of 8" in recovery.reason


def test_a_tall_value_matrix_is_used_whole():
    evidence, X = random_layer("pd", 4, 8, e=13)
    recovery = AttentionAttack()(evidence)
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) <= RIGHT


@few
@given(seeds, st.sampled_from([1e-6, 1e-2, 1.0]), st.booleans())
def test_negative_control_noise_on_a_tall_layer_is_never_recovered(seed, share, causal):
    evidence, _ = random_layer("pd", 4, 6, seed=seed, e=9, causal=causal)
    noise = gaussian(seed + 5, 4, 9)
    noise *= share * evidence.output.norm() / noise.norm()
    output = noise if share == 1.0 else evidence.output + noise
    recovery = AttentionAttack()(AttentionEvidence(evidence.W, evidence.V, output, causal))
    assert recovery.status is Status.NOTHING_FOUND
    assert "outside the row space" in recovery.reason
    assert not recovery.certificate.holds


def test_theorem_degree_noise_on_a_square_definite_layer_is_an_output_too():
    """sym(W) ≻ 0: every matrix is the output of some input, so noise has an exact pre-image, and no test tells."""
    evidence, X = random_layer("pd", 3, 6)
    noise = gaussian(99, 3, 6) * evidence.output.norm() / 18**0.5
    recovery = AttentionAttack()(AttentionEvidence(evidence.W, evidence.V, noise))
    assert len(recovery.value) % 2 == 1
    again = AttentionMap(evidence.W)(recovery.value.X) @ evidence.V
    assert relative_error(again, noise) < 1e-10
    assert min(errors(recovery, X)) > 0.1
    assert recovery.status is not Status.RECOVERED or "noise in the output would not show" in recovery.certificate.claim


@pytest.mark.parametrize("causal", [False, True])
def test_theorem_degree_every_preimage_lies_in_an_explicit_ball_and_their_signs_add_up_to_1(causal):
    """λ‖X‖² ≤ ‖W‖‖X‖‖Y‖ + n·log n; a layer with three pre-images shows that it is all of them that count."""
    numbers = set()
    for seed in range(12):
        evidence, _ = random_layer("pdskew", 3, 3, 3.0, seed, causal=causal)
        recovery = AttentionAttack(num_starts=96)(evidence)
        problem = pose(evidence).problem()
        least, size = problem.least_eigenvalue, float(problem.Y.norm())
        reach = float(torch.linalg.matrix_norm(problem.W, 2)) * size
        radius = (reach + (reach**2 + 4 * least * 3 * math.log(3)) ** 0.5) / (2 * least)
        assert all(float(preimage.X.norm()) <= radius for preimage in recovery.value.preimages)
        numbers.add(len(recovery.value))
        if len(recovery.value) > 1 and recovery.value.num_converged > 90:
            assert recovery.value.degree == 1
    assert max(numbers) >= 3


def test_noise_on_an_indefinite_layer_is_never_recovered():
    for seed in range(3):
        evidence, _ = random_layer("gauss", 4, 8, seed=seed)
        noise = gaussian(seed, 4, 8) * evidence.output.norm() / 32**0.5
        assert AttentionAttack()(AttentionEvidence(evidence.W, evidence.V, noise)).status is not Status.RECOVERED


def test_repeated_tokens_are_never_called_recovered():
    evidence, X = random_layer("pd", 4, 8)
    output = AttentionMap(evidence.W)(X[[0, 1, 2, 2]]) @ evidence.V
    recovery = AttentionAttack()(AttentionEvidence(evidence.W, evidence.V, output))
    assert recovery.status is not Status.RECOVERED


def test_an_output_of_zeros_is_refused():
    evidence, _ = random_layer("pd", 3, 4)
    zero = AttentionEvidence(evidence.W, evidence.V, torch.zeros_like(evidence.output))
    assert AttentionAttack()(zero).status is Status.NOTHING_FOUND


def test_float32_evidence_gives_the_preimage_of_what_was_stored():
    evidence, X = random_layer("pd", 4, 8)
    stored = AttentionEvidence(evidence.W.float(), evidence.V.float(), evidence.output.float())
    recovery = AttentionAttack()(stored)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.X.dtype == torch.float64
    assert relative_error(recovery.value.X, X) < 1e-4  # rounding of 6e-8, times κ(V)/σ_min(J)


@pytest.mark.parametrize(
    "coarse",
    [
        lambda B: B.bfloat16().float(),
        lambda B: (B / B.abs().max() * 127).round() * B.abs().max() / 127,
        lambda B: B.round(decimals=3),
    ],
    ids=["bfloat16", "int8", "decimals"],
)
def test_a_rounded_output_in_a_wide_type_is_never_recovered(coarse):
    for seed in range(6):
        evidence, _ = random_layer("pd", 3, 6, seed=seed)
        recovery = AttentionAttack()(AttentionEvidence(evidence.W, evidence.V, coarse(evidence.output)))
        assert recovery.status is not Status.RECOVERED
        assert len(recovery.value) == 0 or "was rounded to" in recovery.reason or len(recovery.value) > 1


# Symmetry, reproducibility, the fence


def test_permuted_tokens_give_permuted_inputs():
    evidence, _ = random_layer("pdskew", 5, 8)
    order = [3, 0, 4, 1, 2]
    permuted = AttentionEvidence(evidence.W, evidence.V, evidence.output[order])
    assert torch.allclose(AttentionAttack()(permuted).value.X, AttentionAttack()(evidence).value.X[order], atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_seed_gives_the_same_recovery_and_evidence_is_not_touched(causal):
    evidence, _ = random_layer("gauss", 3, 6, causal=causal)
    before = [tensor.clone() for tensor in (evidence.W, evidence.V, evidence.output)]
    first, second = AttentionAttack(seed=3)(evidence), AttentionAttack(seed=3)(evidence)
    assert first.reason == second.reason
    assert len(first.value) == len(second.value)
    for one, other in zip(first.value.preimages, second.value.preimages, strict=True):
        assert torch.equal(one.X, other.X)
    assert all(torch.equal(a, b) for a, b in zip(before, (evidence.W, evidence.V, evidence.output), strict=True))
