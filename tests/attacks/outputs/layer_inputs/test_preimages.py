"""Certificates of pre-images: what they prove is so, and the bound without matrices bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.outputs.attention_layers import gaussian, random_layer

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.preimages import Preimage, Preimages, certify, inverse_bound, merge_roots
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.solvers.iterate import iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=25)


@quick
@given(st.integers(0, 10**6), st.sampled_from(["pd", "pdskew", "gauss"]), st.sampled_from([1.0, 3.0]), st.booleans())
def test_newton_kantorovich_the_input_is_within_the_radius(seed, family, sharpness, causal):
    evidence, X = random_layer(family, 4, 6, sharpness, seed, causal=causal)
    posed = pose(evidence)
    problem = posed.problem()
    near = problem.flat(X) * (1 + 1e-9)
    root = iterate(LevenbergMarquardt(1e-14 * float(problem.Y.norm())), problem, near, max_steps=4).state.x
    preimage = certify(posed, problem, root, dense_limit=100)
    if preimage.certified and preimage.unique_within > 1e-6 * float(X.norm()):
        assert float((preimage.X - X).norm()) <= preimage.radius
        assert preimage.residual < 1e-10
        assert preimage.radius < preimage.unique_within


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "rounded", [lambda B: B.float(), lambda B: B.round(decimals=6)], ids=["float32", "six decimals"]
)
@pytest.mark.parametrize(("n", "d"), [(2, 3), (4, 4), (3, 6)])
def test_rounding_of_the_output_is_in_the_radius(n, d, rounded, causal):
    num_certified = 0
    for seed in range(6):
        evidence, X = random_layer("pd", n, d, seed=seed, causal=causal)
        found = AttentionAttack(num_starts=24)(replace(evidence, output=rounded(evidence.output))).value
        if len(found) == 1 and found.preimages[0].certified:
            num_certified += 1
            assert 1e-9 < float((found.X - X).norm()) <= found.preimages[0].radius
    assert num_certified > 0


def test_large_problems_bound_the_part_outside_the_row_space_without_its_jacobian(monkeypatch):
    evidence, X = random_layer("gauss", 3, 9, 3.0)
    posed = pose(evidence)
    problem = posed.problem()
    dense = certify(posed, problem, problem.flat(X), dense_limit=100)
    monkeypatch.setattr("unmask.attacks.outputs.layer_inputs.preimages._DENSE_WHOLE", 0)
    bounded = certify(posed, problem, problem.flat(X), dense_limit=100)
    assert dense.inverse_norm <= bounded.inverse_norm < 100 * dense.inverse_norm
    assert dense.orientation == bounded.orientation != 0


def test_a_point_that_is_no_root_gets_no_certificate():
    evidence, X = random_layer("pd", 4, 8)
    posed = pose(evidence)
    problem = posed.problem()
    assert not certify(posed, problem, problem.flat(1.1 * X), dense_limit=100).certified


def test_beyond_the_dense_limit_only_the_bound_without_matrices_is_left():
    evidence, X = random_layer("gauss", 4, 8)
    posed = pose(evidence)
    problem = posed.problem()
    assert certify(posed, problem, problem.flat(X), dense_limit=100).certified
    assert not certify(posed, problem, problem.flat(X), dense_limit=1).certified


@quick
@given(st.integers(0, 10**6), st.floats(0.1, 10), st.sampled_from(["pd", "pdskew", "gauss"]))
def test_the_bound_without_matrices_is_above_the_inverse_and_knows_its_sign(seed, sharpness, family):
    evidence, X = random_layer(family, 4, 12, 4 * sharpness, seed)
    problem = pose(evidence).problem()
    x = problem.flat(X)
    bounded = inverse_bound(problem.point(x))
    if bounded is not None:
        J = problem.jacobian(x)
        assert bounded[0] >= 1 / float(torch.linalg.svdvals(J)[-1]) * (1 - 1e-9)
        assert bounded[1] == int(torch.linalg.slogdet(J)[0])


def test_the_bound_without_matrices_exists_where_tokens_see_themselves():
    evidence, X = random_layer("pd", 6, 40, 5.0)
    problem = pose(evidence).problem()
    assert inverse_bound(problem.point(problem.flat(X))) is not None


def test_equal_roots_are_merged_and_others_kept():
    x, y = gaussian(0, 5), gaussian(1, 5)
    size = float(x.norm())
    assert len(merge_roots([x, x + 1e-9 * y, y, y, x], size)) == 2
    assert len(merge_roots([x, x + 1e-3 * y], size)) == 2
    assert merge_roots([], 1.0) == ()


def test_preimages_in_words():
    first = Preimage(gaussian(0, 2, 3), 0.0, 1e-12, 1e-3, 1.0, 1)
    other = Preimage(gaussian(1, 2, 3), 0.0, math.inf, 0.0, 1.0, -1)
    found = Preimages((first, other))
    assert torch.equal(found.X, first.X)
    assert (len(found), found.degree) == (2, 0)
    assert first.certified
    assert not other.certified
    with pytest.raises(IndexError):
        Preimages().X  # noqa: B018
