import math

import pytest
import torch
from tests.attacks.queries.layers import vector_layer
from tests.attacks.queries.random_heads import added, oracle_of, random_head, repeating, rounded
from tests.attacks.queries.random_networks import even_layers, normal, random_layers, random_transformer, relative
from tests.sampling import sample

import unmask
from unmask.attacks import recover as weights
from unmask.attacks.recover import recover_from_answers
from unmask.evidence import OracleEvidence
from unmask.evidence.oracles import Refused
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads

HEADS = random_head(10, num_heads=3)


def test_the_front_door_takes_a_function_and_a_width():
    recovery = unmask.recover_weights(unmask.FunctionOracle(HEADS), width=10)
    assert recovery.status is Status.RECOVERED
    assert recovery.value.W.shape == (3, 10, 10)
    assert score_heads(recovery.value, HEADS).worst_W_error <= 1e-11


def test_a_ledger_file_lets_a_run_go_on(tmp_path):
    asked = []

    def layer(X):
        asked.append(len(X))
        return HEADS(X)

    def run(budget):
        oracle = unmask.FunctionOracle(layer)
        return unmask.recover_weights(oracle, width=10, ledger=tmp_path / "answers", budget=budget)

    first = run(500)
    assert first.status is Status.BUDGET_EXHAUSTED
    assert sum(asked) <= 500
    second = run(None)
    assert second.status is Status.RECOVERED
    assert sum(asked) <= second.cost.queries, "what the first run paid for was not paid for again"
    third = run(None)
    whole = unmask.recover_weights(unmask.FunctionOracle(HEADS), width=10)
    assert torch.allclose(second.value.W, third.value.W, rtol=0, atol=1e-13)
    assert torch.allclose(second.value.W, whole.value.W, rtol=0, atol=1e-13)
    before = sum(asked)
    run(before)
    assert sum(asked) == before, "everything is known, so that nothing is paid for"


def test_progress_is_told():
    told = []
    unmask.recover_weights(unmask.FunctionOracle(HEADS), width=10, progress=lambda *step: told.append(step[0]))
    assert "learning columns of W" in told


@pytest.fixture
def asked_of(monkeypatch):
    """The names of the attacks that are run, in order."""
    names = []
    for name in ("MembershipAttack", "VectorHeadsAttack", "MultiHeadAttack", "NoisyAttack", "CircleHeadsAttack"):
        attack = getattr(weights, name)

        def noted(*settings, _attack=attack, _name=name, **named):
            made = _attack(*settings, **named)

            def run(*evidence, **options):
                names.append(_name)
                return made(*evidence, **options)

            return run

        monkeypatch.setattr(weights, name, noted)
    return names


def test_numbers_go_to_isolation(asked_of):
    assert recover_from_answers(oracle_of(HEADS)).status is Status.RECOVERED
    assert asked_of == ["MultiHeadAttack"]


def test_signs_go_to_bisection(asked_of):
    head = random_head(4)
    recovery = recover_from_answers(oracle_of(head, after=torch.sign))
    assert asked_of == ["MembershipAttack"]
    assert recovery.status.conclusive


def test_vectors_go_to_all_heads_at_once(asked_of):
    heads = vector_layer(2, 8, 8)
    recovery = recover_from_answers(oracle_of(heads))
    assert asked_of == ["VectorHeadsAttack"]
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-11


@pytest.mark.parametrize(
    ("num_heads", "layers", "most"),
    [
        (1, random_layers(8, 8), 800),
        (1, even_layers(8, 16), 800),
        (1, random_layers(8, 1), 800),
        (2, random_layers(8, 8), 2500),
    ],
    ids=["generic", "even", "one neuron", "two heads"],
)
def test_a_network_behind_the_heads_is_tried_at_once(num_heads, layers, most):
    """Heads alone answer a token and its negative alike: one question tells that there is more."""
    transformer = random_transformer(num_heads, 8, layers)
    recovery = unmask.recover_weights(unmask.FunctionOracle(transformer), width=8)
    assert recovery.status is Status.RECOVERED
    assert recovery.cost.queries < most
    X = normal(77)(50, 5, 8)
    assert relative(recovery.value(X), transformer(X)) < 1e-8


def test_what_is_no_network_either_is_nothing():
    head, other = (random_head(8, seed) for seed in (0, 1))
    recovery = unmask.recover_weights(unmask.FunctionOracle(lambda X: head(X).abs() + other(X * X.sign())), width=8)
    assert not recovery.status.conclusive
    assert len(recovery.value) == 0
    assert recovery.cost.queries < 3000


def test_a_single_head_under_a_bound_is_read_by_averaged_passes(asked_of):
    head = random_head(8)
    recovery = recover_from_answers(oracle_of(head, after=rounded(2), max_norm=12.0))
    assert asked_of == ["MultiHeadAttack", "NoisyAttack"]
    assert recovery.status.conclusive
    assert score_heads(recovery.value, head).worst_W_error <= 0.05


@pytest.mark.parametrize("largest", [1e-6, 1e-4, 1e-2])
def test_noise_that_repeats_is_read_as_fresh_noise_is(largest):
    """The oracle of Thm 6.1: a question is answered alike each time, and wrong by `largest` at most."""
    head = random_head(4)
    recovery = unmask.recover_weights(unmask.FunctionOracle(lambda X: repeating(largest)(head(X))), width=4)
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, head).worst_W_error <= 1e-9
    assert "the same each time" in recovery.reason


@pytest.mark.parametrize("after", [added(1e-4), rounded(4), repeating(1e-4)])
def test_a_bounded_function_beside_a_head_is_no_noise(after):
    """A boost of tokens divides it, as it does noise; tokens of ordinary norm show it."""
    head = random_head(4)
    oracle = unmask.FunctionOracle(lambda X: after(head(X) + 0.01 * (3 * X[:, -1].sum(1)).tanh()))
    recovery = unmask.recover_weights(oracle, width=4)
    assert recovery.status is Status.PARTIAL
    assert score_heads(recovery.value, head).worst_W_error <= 1e-9
    assert "another function" in recovery.reason


@pytest.mark.parametrize("num_heads", [2, 4])
def test_several_heads_under_a_bound_are_read_beside_a_circle(asked_of, num_heads):
    heads = random_head(5, num_heads=num_heads)
    recovery = recover_from_answers(oracle_of(heads, max_norm=10.0))
    assert asked_of[-1] == "CircleHeadsAttack"
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-10


@pytest.mark.slow
def test_many_heads_under_a_bound_are_refused():
    """Or read to the error that is announced; never claimed wrongly."""
    heads = random_head(4, num_heads=4)
    recovery = recover_from_answers(oracle_of(heads, after=rounded(2), max_norm=10.0))
    assert recovery.status is Status.NOTHING_FOUND or score_heads(recovery.value, heads).worst_W_error <= 0.1


@pytest.mark.parametrize("budget", [0, 10, 30])
def test_a_budget_may_end_while_the_oracle_is_probed(budget):
    recovery = recover_from_answers(oracle_of(HEADS, budget=budget))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert len(recovery.value) == 0
    assert "while the oracle was probed" in recovery.reason


def test_a_bound_that_is_found_by_asking_is_kept():
    longest = []

    def bounded(X):
        norms = X.norm(dim=2).amax(1)
        longest.append(float(norms.max()))
        return torch.where(norms <= 1e5, HEADS(X), torch.nan)

    recovery = unmask.recover_weights(unmask.FunctionOracle(bounded), width=10)
    assert recovery.status is Status.RECOVERED
    assert sum(norm > 1e5 for norm in longest) <= 8, "only probing asks too much, until it knows the bound"
    assert score_heads(recovery.value, HEADS).worst_W_error <= 1e-10


@pytest.mark.slow
def test_noise_under_a_bound_and_several_heads():
    heads = random_head(6, num_heads=2)
    recovery = recover_from_answers(oracle_of(heads, after=added(1e-3), max_norm=10.0))
    score = score_heads(recovery.value, heads)
    assert not recovery.status.conclusive or score.worst_W_error <= 0.2
    assert math.isfinite(recovery.cost.seconds)


def test_a_vector_of_one_number_is_a_number():
    heads = random_head(8, num_heads=2)
    recovery = unmask.recover_weights(unmask.FunctionOracle(lambda X: heads(X)[:, None]), width=8)
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-10


def test_tokens_of_one_entry():
    heads = HeadWeights(W=torch.full((1, 1, 1), 0.7).double(), v=torch.full((1, 1), -1.3).double())
    recovery = unmask.recover_weights(unmask.FunctionOracle(heads), width=1)
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-12


@sample("scale", [1e-4, 3e-5], [1e-4])
def test_weights_that_do_not_show_under_the_bound_are_not_claimed(scale):
    heads = random_head(6, num_heads=2)
    small = HeadWeights(W=scale * heads.W, v=heads.v)
    oracle = unmask.FunctionOracle(lambda X: small(X).mul(1e4).round() / 1e4)
    recovery = unmask.recover_weights(oracle, width=6, max_norm=4.0)
    assert recovery.status is not Status.RECOVERED
    assert len(recovery.value) == 0


def test_the_cost_counts_attacks_that_failed_before():
    heads = random_head(12)
    evidence = OracleEvidence(unmask.FunctionOracle(heads), 12, max_norm=12.0)
    recovery = recover_from_answers(evidence)
    assert recovery.status is Status.RECOVERED
    assert recovery.cost.queries == evidence.ledger.num_asked


def test_a_file_of_another_layers_answers_is_seen(tmp_path):
    first, second = random_head(6, num_heads=2, seed=1), random_head(6, num_heads=2, seed=2)
    ledger = tmp_path / "answers.sqlite"
    assert unmask.recover_weights(unmask.FunctionOracle(first), width=6, ledger=ledger).status is Status.RECOVERED
    again = unmask.recover_weights(unmask.FunctionOracle(first), width=6, ledger=ledger)
    assert again.status is Status.RECOVERED
    other = unmask.recover_weights(unmask.FunctionOracle(second), width=6, ledger=ledger)
    assert other.status is Status.NOTHING_FOUND
    assert len(other.value) == 0
    assert "another layer" in other.reason


@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_a_used_ledger_is_trusted_where_answers_are_rounded_and_tokens_bounded(tmp_path, scale):
    """The bound is found by asking, and rounding takes most of the answers to ordinary tokens."""
    heads = random_head(6)
    small = HeadWeights(W=heads.W, v=scale * heads.v)

    def layer(X):
        if float(X.norm(dim=2).max()) > 3e5:
            raise Refused("a token is too long")
        return small(X).mul(1e2).round() / 1e2

    oracle, ledger = unmask.FunctionOracle(layer), tmp_path / "answers.sqlite"
    first, again = (unmask.recover_weights(oracle, width=6, ledger=ledger) for _ in range(2))
    assert first.status is Status.RECOVERED
    assert again.status is Status.RECOVERED


@pytest.mark.parametrize("attack", [None, "single-head", "many-heads"])
def test_a_ledger_of_another_layer_is_noticed_by_every_attack(attack, tmp_path):
    one, other = (random_head(4, seed=seed) for seed in (0, 1))
    path = tmp_path / "answers.sqlite"
    first = unmask.recover_weights(unmask.FunctionOracle(one, "f"), width=4, ledger=path, attack=attack)
    assert first.status is Status.RECOVERED
    again = unmask.recover_weights(unmask.FunctionOracle(other, "f"), width=4, ledger=path, attack=attack)
    assert again.status is Status.NOTHING_FOUND
    assert "another layer" in again.reason
    assert len(again.value) == 0


@pytest.mark.parametrize("attack", [3, ["dager"], b"dager"])
def test_what_is_no_attack_is_refused_with_a_sentence(attack):
    with pytest.raises(unmask.UnmaskError, match="must be a name or an attack"):
        unmask.recover_weights(unmask.FunctionOracle(random_head(4), "f"), width=4, attack=attack)
