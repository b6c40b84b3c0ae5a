"""Two-layer ReLU networks from queries: whole or not at all, and never invented (§4.1 of arXiv 2601.16873)."""

import math

import pytest
import torch
from tests.attacks.queries.network_score import score_network
from tests.attacks.queries.random_networks import Layers, evidence_of, normal, oracle_of_network, random_layers

from unmask.attacks.queries.networks.relu_network import ReluNetworkAttack
from unmask.recovery import Status


def recovered(layers, **settings):
    evidence = oracle_of_network(layers)
    found = ReluNetworkAttack(biases=layers.hidden_bias is not None, **settings)(evidence)
    assert found.status is Status.RECOVERED, found.reason
    assert found.certificate.holds
    assert found.cost.queries == evidence.ledger.num_asked
    return found, score_network(found.value, layers.described, tolerance=1e-9)


def queries_each(found, count):
    return found.certificate.details["learning_queries"] / count


# Errors are the noise, some 1e-16, over a hundredth of the narrowest gap between kinks, about 1/m².


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_section_4_1_network_with_as_many_neurons_as_inputs(seed):
    layers = random_layers(16, 16, seed)
    found, score = recovered(layers)
    assert score.function_error < 1e-10
    assert (score.num_true, score.num_missing, score.num_extra) == (16, 0, 0)
    assert queries_each(found, 16 * 16) < 2.6
    B, a = found.value.layers()  # orientations are known: the neurons themselves, up to scale
    assert len(B) == 16
    x = normal(9)(50, 16)
    assert torch.allclose((x @ B.T).relu() @ a, layers(x), atol=1e-9)


def test_section_4_1_network_with_four_times_as_many_neurons():
    found, score = recovered(random_layers(16, 64))
    assert score.function_error < 1e-8
    assert score.num_missing == score.num_extra == 0
    assert queries_each(found, 16 * 64) < 2.3
    assert found.value.orientation is None
    assert "not determined" in found.reason


def test_section_4_1_network_64_256():
    found, score = recovered(random_layers(64, 256))
    assert score.function_error < 1e-6
    assert score.num_missing == score.num_extra == 0
    assert queries_each(found, 64 * 256) < 1.8


@pytest.mark.slow
def test_biases_784_32():
    found, score = recovered(random_layers(784, 32, biases=True))
    assert score.function_error < 1e-8
    assert score.num_missing == score.num_extra == 0
    assert queries_each(found, 32 * 786 + 1) < 1.15  # 1.11 on ARM, below 1.1 on x86: rounding decides


@pytest.mark.slow
def test_biases_784_128():
    found, score = recovered(random_layers(784, 128, biases=True))
    assert score.function_error < 1e-6
    assert queries_each(found, 128 * 786 + 1) < 1.1


def test_one_input_with_biases():
    _, score = recovered(random_layers(1, 3, biases=True))
    assert score.function_error < 1e-10
    assert ReluNetworkAttack()(oracle_of_network(random_layers(1, 3))).status is Status.NOT_APPLICABLE


def test_polish_reaches_the_last_digits():
    _, score = recovered(random_layers(16, 16, 2), polish=True)
    assert score.function_error < 5e-15


@pytest.mark.parametrize("seed", range(3))
def test_float32_with_few_neurons(seed):
    layers = random_layers(16, 8, seed)
    found = ReluNetworkAttack(polish=True)(oracle_of_network(layers, torch.float32))
    assert found.status is Status.RECOVERED
    assert score_network(found.value, layers.described).function_error < 2e-6


def test_float32_with_many_neurons_is_not_claimed():
    found = ReluNetworkAttack()(oracle_of_network(random_layers(16, 64), torch.float32))
    assert found.status is Status.NOTHING_FOUND
    assert_nothing(found)
    assert "too coarse" in found.reason


@pytest.mark.parametrize("seed", range(6))
def test_what_is_claimed_is_so(seed):
    """The certificate against the score, where the arithmetic is at its limit."""
    layers = random_layers(16, 16, 30 + seed)
    found = ReluNetworkAttack(seed=seed)(oracle_of_network(layers, torch.float32))
    error = score_network(found.value, layers.described).function_error
    assert (error < 0.01) if found.status is Status.RECOVERED else (error == math.inf)


@pytest.mark.parametrize("spoil", ["noise", "decimals"])
def test_added_errors_are_outgrown_by_longer_inputs(spoil):
    layers, draw = random_layers(8, 8), normal(5)

    def answer(X):
        return layers(X[:, 0]).round(decimals=3) if spoil == "decimals" else layers(X[:, 0]) + 1e-4 * draw(len(X))

    found = ReluNetworkAttack()(evidence_of(answer, 8))
    assert found.status is Status.RECOVERED
    assert score_network(found.value, layers.described).function_error < 1e-8


def test_the_same_seed_gives_the_same_network():
    one, two = (ReluNetworkAttack(seed=4)(oracle_of_network(random_layers(8, 8))) for _ in range(2))
    assert torch.equal(one.value.normals, two.value.normals)


# What must not be claimed


def assert_nothing(found):
    assert len(found.value) == 0
    assert bool(found.value.linear.isnan().all())
    assert not found.certificate.holds


def random_answer(X):
    return torch.randn(len(X), dtype=torch.float64)


CONTROLS = {
    "random": (random_answer, Status.NOTHING_FOUND, Status.NOTHING_FOUND),
    "sine": (lambda X: X[:, 0].sum(dim=1).sin(), Status.NOT_APPLICABLE, Status.NOTHING_FOUND),
    "norm": (lambda X: X[:, 0].norm(dim=1), Status.NOTHING_FOUND, Status.NOTHING_FOUND),
    "zero": (lambda X: torch.zeros(len(X)), Status.NOTHING_FOUND, Status.NOTHING_FOUND),
    "signs": (lambda X: X[:, 0].sum(dim=1).sign(), Status.NOT_APPLICABLE, Status.NOT_APPLICABLE),
    "vectors": (lambda X: X[:, 0].relu(), Status.NOT_APPLICABLE, Status.NOT_APPLICABLE),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_invented(name, biases):
    torch.manual_seed(0)
    function, *statuses = CONTROLS[name]
    evidence = evidence_of(function, 4)
    found = ReluNetworkAttack(biases=biases, max_neurons=500)(evidence)
    assert found.status is statuses[biases]
    assert_nothing(found)
    assert evidence.ledger.num_asked < 25_000


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_biases_where_none_are_allowed_are_seen(size):
    layers = random_layers(8, 8, biases=True)
    layers = Layers(layers.hidden, layers.output, size * layers.hidden_bias, size * layers.output_bias)
    found = ReluNetworkAttack()(oracle_of_network(layers))
    assert found.status is Status.NOT_APPLICABLE
    assert "biases=True" in found.reason
    assert_nothing(found)


def test_a_deeper_network_is_not_taken_for_a_shallow_one():
    draw = normal(3)
    A, B, a = draw(6, 4), draw(6, 6), draw(6)
    found = ReluNetworkAttack()(evidence_of(lambda X: ((X[:, 0] @ A.T).relu() @ B.T).relu() @ a, 4))
    assert found.status is Status.NOTHING_FOUND
    assert_nothing(found)


def test_too_few_neurons_allowed():
    found = ReluNetworkAttack(max_neurons=10)(oracle_of_network(random_layers(8, 30)))
    assert found.status is Status.NOTHING_FOUND
    assert "max_neurons" in found.reason


@pytest.mark.parametrize("budget", [10, 100, 300])
def test_a_budget_that_ends_leaves_nothing_filled_in(budget):
    evidence = oracle_of_network(random_layers(8, 16), budget=budget)
    found = ReluNetworkAttack()(evidence)
    assert found.status is Status.BUDGET_EXHAUSTED
    assert_nothing(found)
    assert len(evidence.ledger) <= budget


def test_inputs_that_are_refused_are_an_ending():
    layers = random_layers(8, 4, biases=True)

    def answer(X):
        return torch.where(X[:, 0].norm(dim=1) > 100, math.nan, layers(X[:, 0]))

    found = ReluNetworkAttack(biases=True)(evidence_of(answer, 8))
    assert found.status is Status.NOT_APPLICABLE
    assert "refused" in found.reason
