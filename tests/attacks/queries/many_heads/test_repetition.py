import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head, rounded
from tests.sampling import sample

from unmask.attacks.queries.many_heads.repetition import RepetitionAttack
from unmask.errors import InputError
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads

BOUND = 10.0  # `oracle_of` fails a test that asks with a longer token


def scored(heads, attack=RepetitionAttack(), **options):  # noqa: B008 (frozen)
    recovery = attack(oracle_of(heads, max_norm=BOUND, **options))
    return recovery, score_heads(recovery.value, heads)


# About 30 times what was measured: 3e-15 to 1e-14 in float64.
@sample("num_heads, width, allowed", [(1, 8, 1e-13), (2, 8, 3e-13), (3, 8, 3e-13)], [(1, 8, 1e-13), (2, 8, 3e-13)])
def test_arxiv_2608_03294_heads_are_learned_from_repeated_tokens_of_bounded_norm(num_heads, width, allowed):
    recovery, score = scored(random_head(width, num_heads=num_heads))
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.details["num_heads"] == num_heads == score.num_true
    assert score.num_extra == score.num_missing == 0
    assert max(score.worst_W_error, score.worst_v_error) <= allowed
    # Kim, Kim, Guo count 4Hd² − 2H + 1 in exact arithmetic; ratios and directions to spare cost about twice as much.
    learning = recovery.certificate.details["learning_queries"]
    assert learning <= 5 * (num_heads + 1) * width**2 + 90 * width + 1000


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 2, 3])
def test_heads_of_width_16(num_heads):
    recovery, score = scored(random_head(16, num_heads=num_heads))
    assert recovery.status is Status.RECOVERED
    assert score.worst_W_error <= 3e-13


def test_two_heads_in_float32():
    recovery, score = scored(random_head(6, num_heads=2), dtype=torch.float32)
    assert recovery.status is Status.RECOVERED
    assert score.worst_W_error <= 1e-4  # measured: 4e-6
    assert recovery.certificate.details["estimated_error"] == pytest.approx(score.worst_W_error, rel=4)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 2])
def test_two_decimals_leave_the_error_that_is_announced(num_heads):
    recovery, score = scored(random_head(8, num_heads=num_heads, seed=2), after=rounded(2))
    assert recovery.status is Status.RECOVERED
    estimated = recovery.certificate.details["estimated_error"]
    assert estimated / 5 <= score.worst_W_error <= 5 * estimated
    assert 1e-4 < estimated < 0.1


@sample("num_heads, max_heads", [(4, 3), (2, 1), (3, 2)], [(2, 1), (3, 2)])
def test_more_heads_than_allowed_are_refused(num_heads, max_heads):
    recovery, _ = scored(random_head(6, num_heads=num_heads), RepetitionAttack(max_heads=max_heads))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    assert f"{max_heads} heads do not explain" in recovery.reason


def test_heads_that_noise_hides_are_never_claimed():
    recovery, score = scored(random_head(5, num_heads=4), after=rounded(2))
    assert recovery.status is Status.NOTHING_FOUND or score.worst_W_error < 0.1


@pytest.mark.slow
def test_an_oracle_that_is_no_attention_is_refused():
    weights = random_head(4).v[0]
    evidence = OracleEvidence(FunctionOracle(lambda X: (X.sum(1) @ weights).abs() + X[:, -1] @ weights), 4)
    recovery = RepetitionAttack(longest=16)(evidence)
    assert not recovery.status.conclusive
    assert len(recovery.value) == 0


def test_answers_of_chance_are_refused():
    generator = torch.Generator().manual_seed(0)
    evidence = OracleEvidence(FunctionOracle(lambda X: torch.randn(len(X), generator=generator)), 4)
    assert not RepetitionAttack()(evidence).status.conclusive


def test_proposition_7_1_equal_heads_come_back_as_one():
    two = random_head(6, num_heads=2)
    split = HeadWeights(W=two.W[[0, 0, 1]], v=torch.stack([two.v[0] * 3, -2 * two.v[0], two.v[1]]))
    silent = HeadWeights(W=torch.cat([split.W, split.W[:1] + 1]), v=torch.cat([split.v, 0 * split.v[:1]]))
    recovery, score = scored(silent)
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 2
    assert score.worst_W_error < 1e-12


def test_heads_whose_values_cancel_are_found():
    heads = random_head(6, num_heads=2)
    heads.v[1] = -heads.v[0]
    recovery, score = scored(heads)
    assert recovery.status is Status.RECOVERED
    assert score.worst_W_error < 1e-12


def test_a_column_of_zeros_is_no_obstacle():
    heads = random_head(4, num_heads=2)
    heads.W[:, :, 2] = 0
    _, score = scored(heads)
    assert score.worst_W_error < 1e-12


def test_a_layer_that_answers_nothing_has_no_head():
    heads = random_head(4)
    heads.v.zero_()
    recovery, _ = scored(heads)
    assert not recovery.status.conclusive


def test_a_budget_leaves_the_columns_that_were_known():
    heads = random_head(6, num_heads=2)
    needed = RepetitionAttack()(oracle_of(heads, max_norm=BOUND)).cost.queries
    recovery = RepetitionAttack()(oracle_of(heads, max_norm=BOUND, budget=needed - 48 - 150))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    known = recovery.value.W.isfinite().all(dim=(0, 1))
    assert 3 <= int(known.sum()) < 6
    for v, W in zip(recovery.value.v, recovery.value.W, strict=True):
        h = int((heads.v - v).norm(dim=1).argmin())
        assert torch.allclose(heads.W[h][:, known], W[:, known], atol=1e-8)
        assert W[:, ~known].isnan().all()
    assert RepetitionAttack()(oracle_of(heads, budget=50)).status is Status.BUDGET_EXHAUSTED


def test_the_same_seed_asks_the_same():
    heads = random_head(4, num_heads=2)
    ledger = Ledger()
    evidence = OracleEvidence(FunctionOracle(heads), 4, ledger)
    first = RepetitionAttack(seed=3)(evidence)
    paid = ledger.num_paid
    second = RepetitionAttack(seed=3)(evidence)
    assert ledger.num_paid - paid <= 6  # repetitions of one answer, which tell the noise, are asked under new names
    assert torch.equal(first.value.W, second.value.W)


def test_signs_and_vectors_are_not_for_this_attack():
    heads = random_head(4)
    for function in (lambda X: heads(X).sign(), lambda X: torch.stack([heads(X), heads(X)], dim=1)):
        assert RepetitionAttack()(OracleEvidence(FunctionOracle(function), 4)).status is Status.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("settings", "message"), [({"max_heads": 4}, "max_heads"), ({"longest": 7}, "longest must be 8")]
)
def test_a_callers_mistake_is_told(settings, message):
    with pytest.raises(InputError, match=message):
        RepetitionAttack(**settings)
