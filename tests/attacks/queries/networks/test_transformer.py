"""One-layer transformers, whole: heads and the network behind them (§4.1 of arXiv 2601.16873)."""

from dataclasses import replace

import pytest
import torch
from tests.attacks.queries.random_networks import (
    Transformer,
    even_layers,
    evidence_of,
    normal,
    random_layers,
    random_transformer,
    relative,
)

from unmask.attacks.queries.networks.transformer import TransformerAttack, TransformerWeights
from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Certificate, Cost, Recovery, Status


def told(W):
    """A stand-in for the learner of heads that is told them."""

    def learn_heads(evidence, progress):
        heads = HeadWeights(W=W, v=W[:, 0])
        return Recovery(heads, Status.RECOVERED, "told", Certificate("told", 0.0, 0.0), Cost())

    return learn_heads


def error_on_sequences(found, transformer):
    X = normal(77)(200, 5, transformer.W.shape[1])
    return relative(found.value(X), transformer(X))


@pytest.mark.parametrize("layers", [random_layers(16, 32), even_layers(16, 32)], ids=["generic", "even"])
def test_section_4_1_one_head_and_its_network(layers):
    transformer = random_transformer(1, 16, layers)
    evidence = transformer.evidence()
    found = TransformerAttack()(evidence)
    assert found.status is Status.RECOVERED
    assert found.certificate.holds
    assert relative(found.value.W, transformer.W) < 1e-13
    assert error_on_sequences(found, transformer) < 1e-9
    assert found.cost.queries == evidence.ledger.num_asked


def test_section_4_1_one_head_64_256():
    transformer = random_transformer(1, 64, random_layers(64, 256))
    found = TransformerAttack()(transformer.evidence())
    assert found.status is Status.RECOVERED
    assert relative(found.value.W, transformer.W) < 1e-13
    assert error_on_sequences(found, transformer) < 1e-6
    assert found.certificate.details["learning_queries_per_degree_of_freedom"] < 1.4


def test_in_float32_W_is_known_and_the_network_is_not_claimed():
    transformer = random_transformer(1, 16, random_layers(16, 64))
    found = TransformerAttack()(transformer.evidence(torch.float32))
    assert found.status is Status.PARTIAL
    assert found.value.network is None
    assert relative(found.value.W, transformer.W) < 1e-5
    with pytest.raises(InputError, match="network behind the heads is not known"):
        found.value(normal(0)(1, 2, 16))


def test_a_deeper_homogeneous_network_hides_itself_and_not_W():
    transformer, draw = random_transformer(1, 8, random_layers(8, 4)), normal(3)
    A, B, a = draw(12, 8), draw(12, 12), draw(12)

    def answer(X):
        scores = torch.einsum("bnd,de,be->bn", X, transformer.W[0], X[:, -1])
        return ((torch.einsum("bn,bnd->bd", scores.softmax(dim=1), X) @ A.T).relu() @ B.T).relu() @ a

    found = TransformerAttack()(evidence_of(answer, 8))
    assert found.status is Status.PARTIAL
    assert found.value.network is None
    assert relative(found.value.W, transformer.W) < 1e-12


def test_routing_2_8_8_with_heads_that_are_told():
    transformer = random_transformer(2, 8, random_layers(8, 8))
    found = TransformerAttack(many_heads=True, learn_heads=told(transformer.W))(transformer.evidence())
    assert found.status is Status.RECOVERED
    assert error_on_sequences(found, transformer) < 1e-9


def test_heads_and_network_2_8_8():
    transformer = random_transformer(2, 8, random_layers(8, 8))
    found = TransformerAttack(many_heads=True)(transformer.evidence())
    assert found.status is Status.RECOVERED
    assert len(found.value.W) == 2
    assert error_on_sequences(found, transformer) < 1e-9


@pytest.mark.slow
def test_heads_and_network_3_16_48():
    transformer = random_transformer(3, 16, random_layers(16, 48))
    found = TransformerAttack(many_heads=True)(transformer.evidence())
    assert found.status is Status.RECOVERED
    assert error_on_sequences(found, transformer) < 1e-8


def test_heads_that_were_learned_wrongly_give_no_network():
    transformer = random_transformer(2, 8, random_layers(8, 8))
    wrong = transformer.W + 0.01 * normal(1)(2, 8, 8)
    found = TransformerAttack(many_heads=True, learn_heads=told(wrong))(transformer.evidence())
    assert found.value.network is None


def test_more_heads_than_can_be_routed():
    transformer = random_transformer(3, 8, random_layers(8, 8))
    found = TransformerAttack(many_heads=True, learn_heads=told(transformer.W))(transformer.evidence())
    assert found.status is Status.PARTIAL
    assert found.value.network is None
    assert "3² equations" in found.reason


# What must not be claimed


def test_two_heads_are_not_taken_for_one():
    found = TransformerAttack()(random_transformer(2, 8, random_layers(8, 8)).evidence())
    assert found.status is Status.NOTHING_FOUND
    assert "many_heads=True" in found.reason
    assert len(found.value.W) == 0


@pytest.mark.parametrize("many_heads", [False, True])
def test_section_4_1_a_network_that_is_zero_hides_W(many_heads):
    layers = random_layers(8, 8)
    transformer = random_transformer(1, 8, replace(layers, output=0 * layers.output))
    found = TransformerAttack(many_heads=many_heads)(transformer.evidence())
    assert found.status is Status.NOT_IDENTIFIABLE
    assert len(found.value.W) == 0


def test_many_heads_under_an_even_network_are_not_identifiable_this_way():
    found = TransformerAttack(many_heads=True)(random_transformer(2, 8, even_layers(8, 8)).evidence())
    assert found.status is Status.NOT_IDENTIFIABLE


def test_biases_are_seen_and_advice_is_given():
    found = TransformerAttack()(random_transformer(1, 8, random_layers(8, 8, biases=True)).evidence())
    assert found.status is Status.NOT_APPLICABLE
    assert "biases=True" in found.reason


def test_a_random_oracle_is_not_a_transformer():
    torch.manual_seed(0)
    found = TransformerAttack()(evidence_of(lambda X: torch.randn(len(X), dtype=torch.float64), 6))
    assert not found.status.conclusive
    assert len(found.value.W) == 0


def test_vectors_are_not_numbers():
    found = TransformerAttack()(evidence_of(lambda X: X[:, -1], 6))
    assert found.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("budget", [20, 700, 1300])
def test_a_budget_that_ends_keeps_what_was_paid_for(budget):
    transformer = random_transformer(1, 24, random_layers(24, 24))
    evidence = transformer.evidence(budget=budget)
    found = TransformerAttack()(evidence)
    assert found.status is Status.BUDGET_EXHAUSTED
    assert found.value.network is None
    assert len(evidence.ledger) <= budget
    if budget == 700:
        known = found.value.W[0].isfinite().all(dim=0)
        assert 0 < int(known.sum()) < 24
        assert relative(found.value.W[0][:, known], transformer.W[0][:, known]) < 1e-12
    if budget == 1300:
        assert relative(found.value.W, transformer.W) < 1e-12


def bounded(transformer, max_norm):
    """An oracle that does not answer to longer tokens, and says so beforehand."""

    def answer(X):
        assert float(X.norm(dim=2).max()) <= max_norm * (1 + 1e-12)
        return transformer(X)

    return replace(evidence_of(answer, transformer.W.shape[1]), max_norm=max_norm)


def test_tokens_of_bounded_norm_are_asked_through_the_difference():
    transformer = random_transformer(1, 8, random_layers(8, 8))
    found = TransformerAttack()(bounded(transformer, 30.0))
    assert found.status is Status.RECOVERED
    assert relative(found.value.W, transformer.W) < 1e-12
    even = TransformerAttack()(bounded(random_transformer(1, 8, even_layers(8, 8)), 30.0))
    assert even.status is Status.NOT_IDENTIFIABLE


def test_rounded_answers_are_outgrown_by_longer_tokens():
    transformer = random_transformer(1, 8, random_layers(8, 8))
    found = TransformerAttack()(evidence_of(lambda X: transformer(X).round(decimals=3), 8))
    assert relative(found.value.W, transformer.W) < 1e-8


def test_the_value_is_the_function():
    layers = random_layers(6, 5)
    transformer = random_transformer(2, 6, layers)
    on_both = replace(layers, hidden=torch.einsum("hde,me->mhd", transformer.V, layers.hidden).flatten(1))
    X = normal(1)(10, 4, 6)
    assert torch.allclose(TransformerWeights(transformer.W, on_both.described)(X), transformer(X), atol=1e-12)
    assert isinstance(transformer, Transformer)
