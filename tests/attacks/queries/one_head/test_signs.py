import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.random_heads import oracle_of, random_head
from tests.sampling import sample

from unmask.attacks.queries.one_head.signs import MembershipAttack, bisect
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def signs(answers):
    return torch.where(answers > 0, 1.0, -1.0)


BITS_32 = MembershipAttack(bits=32)


def learn(heads, attack=BITS_32, after=signs, **options):
    """The score is up to the length of v, which no sign depends on."""
    recovery = attack(oracle_of(heads, after, **options))
    unit = HeadWeights(W=heads.W, v=heads.v / heads.v.norm().clamp_min(1e-300))
    return recovery, score_heads(recovery.value, unit), recovery.certificate.details


BITS = [(1, 20), (2, 24), (16, 16), (16, 32), (16, 48), (24, 40)]


@sample("width, bits", BITS, BITS[:3])
def test_theorem_b_1_every_bit_costs_one_query(width, bits):
    recovery, score, details = learn(random_head(width), MembershipAttack(bits=bits))
    assert recovery.status is Status.RECOVERED
    assert "|v|" in recovery.reason
    assert score.W_error <= max(40 * 2.0**-bits, 1e-13)  # 16·2^(−bits) in a score of deviation 1, and the inverse
    assert score.v_error <= max(2 * 2.0**-bits, 1e-14)
    # d signs, d − 1 comparisons, one that v ≠ 0, and 8 pairs of 8 bits for the scale.
    assert details["learning_queries"] == bits * (width**2 + width - 1) + 2 * width + 64


@pytest.mark.parametrize("after", [torch.sign, lambda answers: (answers > 0).double(), None])
def test_signs_may_be_told_in_any_way(after):
    recovery, score, _ = learn(random_head(8), after=after)
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-7


@sample("factor", [1e-5, 1e-2, 1e2, 1e4], [1e-5, 1e4])
def test_w_of_any_scale(factor):
    head = random_head(8)
    recovery, score, details = learn(HeadWeights(W=factor * head.W, v=1e-3 * head.v))
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-7
    assert details["learning_queries"] <= 32 * (8 * 8 + 8) + 16 + 64 * 6


def test_v_with_zeros_and_w_with_one_entry():
    head = random_head(8)
    head.v[0, ::2] = 0
    head.W[0] *= torch.logspace(-2, 2, 8).double()
    recovery, score, _ = learn(head)
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-6
    assert score.v_error <= 1e-8


def test_w_zero():
    head = random_head(8)
    recovery, *_ = learn(HeadWeights(W=0 * head.W, v=head.v))
    assert recovery.status is Status.RECOVERED
    assert not recovery.value.W.any()


@pytest.mark.parametrize("after", [torch.sign, signs])
def test_v_zero_is_not_identifiable(after):
    head = random_head(8)
    recovery, *_ = learn(HeadWeights(W=head.W, v=0 * head.v), after=after)
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert len(recovery.value) == 0


def test_two_heads_and_chance_are_refused():
    recovery, *_ = learn(random_head(8, num_heads=2))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    generator = torch.Generator().manual_seed(0)
    recovery, *_ = learn(random_head(8), after=lambda a: torch.randn(a.shape, generator=generator).sign().double())
    assert recovery.status is not Status.RECOVERED
    assert len(recovery.value) == 0


def test_the_certificate_sees_weights_that_are_off_by_a_little():
    """A second head with a millionth of the values: 1,000 times what 32 bits leave, and it shows."""
    heads = random_head(8, num_heads=2)
    heads.v[1] *= 1e-5
    recovery, *_ = learn(heads)
    assert recovery.status is Status.NOTHING_FOUND
    assert 0 < recovery.certificate.residual < 0.6


def test_bounded_norms_are_said_to_be():
    """η scales tokens freely; an oracle that has no answer to long ones ends the attack, and is named."""

    def answer(sequences):
        answers = signs(random_head(8)(sequences))
        return torch.where(sequences.norm(dim=2).amax(1) > 3, torch.nan, answers)

    recovery = MembershipAttack(bits=16)(OracleEvidence(FunctionOracle(answer), 8))
    assert recovery.status is Status.NOTHING_FOUND
    assert "norms" in recovery.reason


def test_a_spent_budget():
    head = random_head(8)
    recovery, *_ = learn(head, budget=1500)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert recovery.value.W.isnan().all()
    assert torch.allclose(recovery.value.v[0], head.v[0] / head.v.norm(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("bits", [0, 53])
def test_bits_that_cannot_be(bits):
    with pytest.raises(InputError, match="bits must be"):
        MembershipAttack(bits=bits)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5), st.integers(1, 40))
@settings(max_examples=40)
def test_bisection_halves_what_is_left(numbers, bits):
    hidden = torch.tensor(numbers, dtype=torch.float64)
    found = bisect(lambda t: hidden > t, len(hidden), -1.0, 1.0, bits)
    assert ((found - hidden).abs() <= 2.0**-bits).all()
