"""g(X) = f(X) − f(−X): a layer of heads alone, paid twice, and nothing where the network is even."""

import pytest
import torch
from tests.attacks.queries.random_networks import even_layers, normal, random_layers, random_transformer, relative

from unmask.attacks.queries.networks.antisymmetric import antisymmetric, antisymmetric_evidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status


def test_section_4_1_the_difference_is_an_attention_layer():
    transformer = random_transformer(3, 6, random_layers(6, 10))
    linear = transformer.layers.described.linear
    heads = HeadWeights(W=transformer.W, v=transformer.V @ linear)
    X = normal(1)(20, 5, 6)
    assert torch.allclose(antisymmetric_evidence(transformer.evidence()).ask(X), heads(X), atol=1e-12)


def test_every_difference_is_two_questions_of_the_oracle():
    evidence = random_transformer(1, 6, random_layers(6, 10)).evidence()
    antisymmetric_evidence(evidence).ask(normal(1)(7, 2, 6))
    assert evidence.ledger.num_asked == 14


def test_section_4_1_W_from_the_difference():
    transformer = random_transformer(1, 16, random_layers(16, 64))
    evidence = transformer.evidence()
    found = antisymmetric(evidence)
    assert found.status is Status.RECOVERED
    assert relative(found.value.W, transformer.W) < 1e-12
    assert found.cost.queries == evidence.ledger.num_asked > 2 * (16**2 + 16)


def test_section_4_1_an_even_network_leaves_nothing():
    for dtype in (torch.float64, torch.float32):
        found = antisymmetric(random_transformer(1, 16, even_layers(16, 64)).evidence(dtype))
        assert found.status is Status.NOT_IDENTIFIABLE
        assert len(found.value) == 0


@pytest.mark.parametrize("budget", [10, 60, 200])
def test_a_budget_that_ends_is_an_ending(budget):
    found = antisymmetric(random_transformer(1, 8, random_layers(8, 16)).evidence(budget=budget))
    assert found.status is Status.BUDGET_EXHAUSTED
