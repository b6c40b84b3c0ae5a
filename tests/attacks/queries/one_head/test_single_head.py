import pytest
import torch
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded

from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def learn(heads, **options):
    recovery = SingleHeadAttack()(oracle_of(heads, **options))
    return recovery, score_heads(recovery.value, heads), recovery.certificate.details


@pytest.mark.parametrize("width", [1, 2, 5, 16, 48])
def test_theorem_4_1_exactly_d_plus_d_squared_queries(width):
    for seed in range(4):
        recovery, score, details = learn(random_head(width, seed))
        assert recovery.status is Status.RECOVERED
        assert recovery.certificate.holds
        assert details["learning_queries"] == width + width**2 == details["degrees_of_freedom"]
        parts = ("learning_queries", "probing_queries", "fresh_queries")
        assert recovery.cost.queries == sum(details[part] for part in parts)
        # Probes that lean towards v and readable scores: some roundings of float64, at any width.
        assert score.W_error <= 1e-14
        assert score.v_error <= 1e-15


@pytest.mark.slow
def test_theorem_4_1_at_width_256():
    """65,792 queries, and thirteen digits."""
    _, score, details = learn(random_head(256))
    assert details["learning_queries"] == 256 + 256**2
    assert score.W_error <= 1e-13


def test_float32_loses_its_own_digits_only():
    for seed in range(3):
        recovery, score, details = learn(random_head(64, seed), dtype=torch.float32)
        assert recovery.status is Status.RECOVERED
        assert score.W_error <= 2e-6  # 30 roundings of float32
        assert details["learning_queries"] <= 64 + 64**2 + 8


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e3, 1e5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_w_of_any_scale(factor, dtype):
    head = random_head(24)
    recovery, score, details = learn(HeadWeights(W=factor * head.W, v=head.v), dtype=dtype)
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= (1e-13 if dtype is torch.float64 else 5e-6)
    assert details["learning_queries"] <= 24 + 24**2 + 2 * 24 + 20


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_v_of_any_scale(factor):
    head = random_head(24)
    _, score, details = learn(HeadWeights(W=head.W, v=factor * head.v))
    assert score.W_error <= 1e-14
    assert details["learning_queries"] == 24 + 24**2


def test_v_with_zeros_and_tiny_entries():
    head = random_head(24)
    head.v[0, ::2] = 0
    head.v[0, 1] = 1e-12
    _, score, _ = learn(head)
    assert score.W_error <= 1e-14
    assert score.v_error <= 1e-15


@pytest.mark.parametrize("name", ["identity", "one entry", "empty first column", "sizes apart"])
def test_structured_w(name):
    head = random_head(16)
    W = head.W[0]
    if name == "identity":
        W[:] = torch.eye(16)
    elif name == "one entry":
        W[:] = 0
        W[3, 7] = 2.0
    elif name == "empty first column":
        W[:, 0] = 0
    else:
        W *= torch.logspace(-4, 4, 16).double()
    recovery, score, details = learn(head)
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-13
    # Columns that are much longer than all before are asked again, each time with a third of the scale.
    assert details["learning_queries"] <= (16 + 16**2) * (3 if name == "sizes apart" else 1.2)


def test_w_zero_is_recovered_as_exactly_zero():
    head = random_head(16)
    recovery, score, _ = learn(HeadWeights(W=0 * head.W, v=head.v))
    assert recovery.status is Status.RECOVERED
    assert not recovery.value.W.any()
    assert score.v_error <= 1e-15


def test_v_zero_is_not_identifiable():
    head = random_head(16)
    recovery, *_ = learn(HeadWeights(W=head.W, v=0 * head.v))
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert len(recovery.value) == 0


def test_rounding_to_two_decimals_hides_nothing_where_tokens_may_be_long():
    recovery, score, details = learn(random_head(24), after=rounded(2))
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-11
    assert details["learning_queries"] == 24 + 24**2


def test_rounding_hides_digits_where_tokens_may_not_be_long():
    recovery, score, _ = learn(random_head(24), after=rounded(2), max_norm=7.0)
    assert recovery.status is Status.RECOVERED
    assert 1e-4 <= score.W_error <= 2e-2


def test_a_w_that_tokens_within_the_bound_do_not_show_is_not_claimed():
    head = random_head(16)
    recovery, *_ = learn(HeadWeights(W=1e-6 * head.W, v=head.v), after=added(1e-3), max_norm=2.0)
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


@pytest.mark.parametrize("num_heads", [2, 3])
def test_several_heads_are_refused_early(num_heads):
    recovery, *_, details = learn(random_head(24, num_heads=num_heads))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    assert details["learning_queries"] <= 24 + 2 * 24


@pytest.mark.parametrize("share", [1e-3, 1e-6])
def test_a_faint_second_head_is_refused_on_fresh_sequences(share):
    heads = random_head(16, num_heads=2)
    heads.v[1] *= share
    recovery, *_ = learn(heads)
    assert recovery.status is Status.NOTHING_FOUND
    assert recovery.certificate.residual > recovery.certificate.tolerance


@pytest.mark.parametrize(
    "function",
    [
        lambda X: torch.randn(len(X), dtype=torch.float64),
        lambda X: random_head(16)(X).tanh(),
        lambda X: X.norm(dim=2).sum(1),
        lambda X: X.sum(dim=(1, 2)),
        lambda X: X[:, :, 0].amax(1),
        lambda X: random_head(16)(X).sign(),
        lambda X: X[:, -1],
    ],
    ids=["chance", "tanh", "norm", "sum", "maximum", "signs", "vectors"],
)
def test_what_is_no_head_is_refused(function):
    recovery = SingleHeadAttack()(OracleEvidence(FunctionOracle(function), 16))
    assert recovery.status in (Status.NOTHING_FOUND, Status.NOT_APPLICABLE)
    assert len(recovery.value) == 0


def test_a_spent_budget_leaves_whole_columns():
    head = random_head(16)
    recovery = SingleHeadAttack()(oracle_of(head, budget=150))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    W, v = recovery.value.W[0], recovery.value.v[0]
    known = W.isfinite().all(0)
    assert 4 <= int(known.sum()) < 16
    assert bool(W[:, ~known].isnan().all())
    assert torch.allclose(W[:, known], head.W[0][:, known], rtol=0, atol=1e-13)
    assert torch.equal(v, head.v[0])
    assert "150" in recovery.reason


@pytest.mark.parametrize("budget", [0, 20, 45, 60])
def test_a_budget_that_is_spent_early(budget):
    recovery = SingleHeadAttack()(oracle_of(random_head(16), budget=budget))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert recovery.value.W.isnan().all()


def test_the_seed_decides_everything():
    head = random_head(12)
    first, second = (SingleHeadAttack(seed=3)(oracle_of(head)).value for _ in range(2))
    assert torch.equal(first.W, second.W)
    assert not torch.equal(first.W, SingleHeadAttack(seed=4)(oracle_of(head)).value.W)
