"""Stacks of attention layers: exact inputs, honest radii, branches, and controls that are never RECOVERED."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.attacks.outputs.attention_layers import gaussian, random_stack

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.attention_stack import AttentionStackAttack
from unmask.attacks.recover import recover_inputs
from unmask.errors import InputError
from unmask.recovery import Status
from unmask.scores.inputs import relative_error

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_definite_stacks_are_exact_and_their_radius_holds(num_layers, causal):
    evidence, X = random_stack("pd", 4, 24, num_layers, 3.0, seed=1, causal=causal)
    recovery = recover_inputs(evidence)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.holds
    assert relative_error(recovery.value.X, X) < 1e-8
    preimage = recovery.value.preimages[0]
    assert float((preimage.X - X).norm()) <= preimage.radius < 1e-6
    assert "under the weights given" in recovery.certificate.claim
    assert recovery.certificate.details["num_layers"] == num_layers


def test_what_averaging_has_lost_is_not_claimed():
    """Four layers whose tokens see each other: outputs are nearly equal rows, and no digits are left."""
    evidence, _ = random_stack("pd", 4, 8, 4)
    recovery = recover_inputs(evidence)
    assert recovery.status is Status.PARTIAL
    assert not any(preimage.certified for preimage in recovery.value.preimages)


def test_one_layer_is_the_attack_on_a_layer():
    evidence, _ = random_stack("pd", 3, 6, 1)
    alone = recover_inputs(evidence.layers[0].evidence(evidence.output))
    assert torch.equal(recover_inputs(evidence).value.X, alone.value.X)


def test_errors_grow_from_layer_to_layer():
    radii = [recover_inputs(random_stack("pd", 3, 6, depth)[0]).value.preimages[0].radius for depth in (1, 2, 3)]
    assert radii[0] < radii[1] < radii[2]


def test_float32_has_its_rounding_in_the_radius():
    evidence, X = random_stack("pd", 3, 6, 2)
    recovery = recover_inputs(replace(evidence, output=evidence.output.float()))
    preimage = recovery.value.preimages[0]
    assert float((preimage.X - X).norm()) <= preimage.radius


def test_several_preimages_of_a_layer_are_all_followed():
    """Indefinite layers: the input is one of the chains, and nothing is called recovered."""
    several = 0
    for seed in range(3):
        evidence, X = random_stack("gauss", 2, 4, 2, 3.0, seed)
        recovery = recover_inputs(evidence)
        assert recovery.status is not Status.RECOVERED
        several += len(recovery.value) > 1
        if len(recovery.value):
            assert all(preimage.residual < 1e-10 for preimage in recovery.value.preimages)
        found = any(relative_error(preimage.X, X) < 1e-6 for preimage in recovery.value.preimages)
        assert found or recovery.value.num_converged < recovery.value.num_starts
    assert several


def test_known_norms_choose_among_the_chains():
    evidence, X = random_stack("gauss", 3, 6, 2)
    recovery = recover_inputs(replace(evidence, row_norms=X.norm(dim=1)))
    assert recovery.status is Status.RECOVERED
    assert relative_error(recovery.value.X, X) < 1e-8
    wrong = recover_inputs(replace(evidence, row_norms=1.01 * X.norm(dim=1)))
    assert wrong.status is Status.NOTHING_FOUND


def test_a_limit_on_chains_is_said():
    for seed in range(20):
        evidence, _ = random_stack("gauss", 2, 4, 2, 3.0, seed)
        last = AttentionAttack()(evidence.layers[1].evidence(evidence.output))
        if len(last.value) > 1:
            break
    recovery = AttentionStackAttack(max_chains=1)(evidence)
    assert recovery.value.budget_ended or len(recovery.value) == 0
    assert recovery.status is not Status.RECOVERED


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_is_never_recovered_where_it_can_show(seed):
    evidence, _ = random_stack("pd", 3, 6, 3, e=9)
    noise = gaussian(seed + 50, *evidence.output.shape)
    recovery = recover_inputs(replace(evidence, output=noise * float(evidence.output.norm() / noise.norm())))
    assert recovery.status is Status.NOTHING_FOUND
    assert "row space" in recovery.reason


def test_a_layer_that_loses_part_of_its_input_ends_the_stack():
    evidence, _ = random_stack("pd", 3, 6, 2)
    first = evidence.layers[0]
    V = torch.cat([first.V[:5], first.V[:1]])
    recovery = recover_inputs(replace(evidence, layers=(replace(first, V=V), evidence.layers[1])))
    assert recovery.status is Status.NOT_IDENTIFIABLE


def test_an_attack_on_one_layer_is_refused():
    with pytest.raises(InputError, match="attention-stack"):
        recover_inputs(random_stack("pd", 3, 6, 2)[0], attack="attention")
