"""Symmetries of a layer: inputs that give the same output with the same norms are never called the only ones."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.attacks.outputs.attention_layers import gaussian, random_layer
from tests.sampling import in_turn, sample
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.attention_stack import AttentionStackAttack
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.attacks.outputs.layer_inputs.symmetries import images, may_have_image, rows_alike
from unmask.evidence.outputs import AttentionEvidence
from unmask.evidence.stacks import AttentionLayer, AttentionStackEvidence
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Status

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

MIRRORED = (1, 5, 19, 21, 45)  # seeds of which a search ends with one of the two


def mirrored_layer(seed: int) -> tuple[Tensor, Tensor]:
    """W that a mirror leaves as it is, and an input whose output the mirror leaves as it is, but not the input."""
    generator = torch.Generator().manual_seed(seed)
    n, d = [(3, 3), (4, 3), (3, 2), (5, 4)][seed % 4]
    W = torch.zeros(d, d, dtype=torch.float64)
    W[:-1, :-1] = torch.randn(d - 1, d - 1, generator=generator, dtype=torch.float64)
    W[-1, -1] = 2 * float(torch.randn(1, generator=generator))
    W = -W if seed % 3 == 0 else W
    x = torch.randn(n, d, generator=generator, dtype=torch.float64).flatten()

    def missing(x: Tensor) -> Tensor:
        X = x.view(n, d)
        return torch.cat([AttentionMap(W)(X)[:, -1], (X[:, -1].square().sum() - n)[None]])

    for _ in range(200):
        r, J = missing(x), torch.func.jacrev(missing)(x)
        damping = 1e-3 * float(r.norm()) * torch.eye(len(r), dtype=torch.float64)
        x = x - J.mT @ torch.linalg.solve(J @ J.mT + damping, r)
        if missing(x).norm() < 1e-15:
            break
    assert missing(x).norm() < 1e-13
    return W, x.view(n, d)


@sample("seed, turned", product(MIRRORED, [False, True]), in_turn(MIRRORED, [True, False]))
def test_an_input_and_its_mirror_image_are_not_told_apart(seed, turned):
    """In float32 behind a rotation, rounding fills the rank that the output lacks."""
    W, X = mirrored_layer(seed)
    output = AttentionMap(W)(X)
    output[:, -1] = 0
    V = torch.linalg.qr(gaussian(seed, len(W), len(W))).Q if turned else torch.eye(len(W), dtype=torch.float64)
    output = (output @ V).float() if turned else output
    recovery = AttentionAttack()(AttentionEvidence(W, V, output, row_norms=X.norm(dim=1)))
    assert recovery.status is not Status.RECOVERED


def test_layers_with_one_mirror_are_not_recovered_as_a_stack():
    W, X = mirrored_layer(45)
    eye = torch.eye(len(W), dtype=torch.float64)
    layers = (AttentionLayer(0.1 * eye, eye), AttentionLayer(W, eye))
    lower = AttentionAttack()(AttentionEvidence(0.1 * eye, eye, X)).value.X
    output = AttentionMap(W)(X)
    output[:, -1] = 0
    recovery = AttentionStackAttack()(AttentionStackEvidence(layers, output, lower.norm(dim=1)))
    assert recovery.status is not Status.RECOVERED


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_can_be_exchanged_are_not_told_apart(seed):
    """Two tokens of the same norm that ask the same: their rows of the output are equal."""
    n, d = 5, 3
    u = gaussian(seed, d) / gaussian(seed, d).norm()
    W, X = gaussian(seed + 10, d, d), gaussian(seed + 20, n, d)
    W = W - torch.outer(u, u @ W)
    X[1] = X[0] - 2 * (X[0] @ u) * u
    evidence = AttentionEvidence(W, torch.eye(d, dtype=W.dtype), AttentionMap(W)(X), row_norms=X.norm(dim=1))
    assert may_have_image(pose(evidence), X)
    assert AttentionAttack()(evidence).status is not Status.RECOVERED


def test_rows_that_a_change_of_sign_exchanges_are_alike():
    W, rows = gaussian(0, 4, 4), gaussian(1, 2, 4)
    Y = torch.cat([rows, -rows])
    alike = rows_alike(W, Y, torch.ones(4, dtype=Y.dtype), 0.0)
    assert alike.int().tolist() == torch.eye(2).repeat(2, 2).int().tolist()
    assert not (rows_alike(W, Y, torch.arange(1.0, 5, dtype=Y.dtype), 0.0).sum(1) > 1).any()


@pytest.mark.parametrize(("n", "d"), [(3, 6), (6, 3)])
def test_layers_of_no_symmetry_have_no_image_and_equal_tokens_are_no_second_input(n, d):
    evidence, X = random_layer("gauss", n, d)
    assert not may_have_image(pose(evidence), X)
    if n > d:
        X = X[[0, 0, *range(2, n)]]
        repeated = AttentionEvidence(evidence.W, evidence.V, AttentionMap(evidence.W)(X) @ evidence.V)
        assert not may_have_image(pose(repeated), X)


def test_images_are_the_root_with_one_change_each():
    evidence, X = random_layer("gauss", 4, 6)
    problem = pose(evidence).problem()
    x = problem.flat(X)
    starts = images(problem, x)
    assert len(starts) == 1 + 4 + 6
    assert torch.equal(starts[0], -x)
    assert torch.allclose(starts.norm(dim=1), x.norm().expand(len(starts)))
    assert float((starts - x).norm(dim=1).min()) > 1e-3
