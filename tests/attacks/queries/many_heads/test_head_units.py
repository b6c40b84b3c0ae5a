import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.random_networks import normal

from unmask.attacks.queries.many_heads.head_units import Units


def clustered(seed: int = 0, width: int = 6) -> Units:
    """A unit of one head, one of two and one of three."""
    draw = normal(seed)
    units = Units.single(draw(3, width))
    units = units.with_members(1, draw(2, width), torch.tensor([1.0, 2.5]).double())
    return units.with_members(2, draw(3, width), torch.tensor([1.0, 0.4, 1.7]).double())


def gaining(units: Units, unit: int, seed: int) -> torch.Tensor:
    """Points at which all heads of a unit add with one sign."""
    eye = torch.eye(units.v.shape[2], dtype=torch.float64)
    return units.leverage(eye, unit) * (1 + 0.1 * normal(seed)(20, 1).abs())


@settings(max_examples=25)
@given(st.integers(0, 999), st.integers(0, 2), st.floats(-12, 6), st.sampled_from([-1, 1]))
def test_scores_are_the_inverse_of_answers(seed, unit, score, sign):
    units = clustered(seed)
    U = sign * gaining(units, unit, seed)
    t = torch.full((20, 3), score, dtype=torch.float64)
    which = torch.full((20,), unit)
    answers = units.answers(U, t)[:, unit]
    # Shares near one lose digits as their slope falls: e⁶·10⁻¹⁶, times some.
    assert torch.allclose(units.scores(answers, U, which), t[:, unit], rtol=0, atol=1e-11)


@settings(max_examples=25)
@given(st.integers(0, 999), st.floats(-12, 6))
def test_without_clusters_the_inverse_is_the_logit(seed, score):
    units = Units.single(normal(seed)(2, 4))
    U = normal(seed + 1)(10, 4)
    U = U[(U @ units.v[1, 0]).abs() > 0.01]
    answers = units.answers(U, torch.full((len(U), 2), score, dtype=torch.float64))[:, 1]
    found = units.scores(answers, U, torch.ones(len(U), dtype=torch.long))
    assert torch.allclose(found, torch.full_like(found, score), rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", [-0.1, 1.1])
@pytest.mark.parametrize("units", [clustered(), Units.single(normal(0)(3, 6))], ids=["clusters", "single"])
def test_an_answer_out_of_range_has_no_score(units, share):
    U = gaining(units, 2, 0)
    answers = share * (U @ units.total[2])
    assert not units.scores(answers, U, torch.full((20,), 2)).isfinite().any()


def test_answers_are_the_sum_that_the_card_writes():
    units, U, t = clustered(), normal(1)(5, 6), normal(2)(5, 3)
    for b in range(5):
        for k in range(3):
            expected = sum(
                (units.v[k, i] @ U[b]) * (units.slopes[k, i] * t[b, k]).sigmoid() for i in range(units.num_heads(k))
            )
            assert units.answers(U, t)[b, k] == pytest.approx(float(expected), rel=1e-12)


def test_members_are_replaced_and_counted():
    units = clustered()
    assert [units.num_heads(unit) for unit in range(3)] == [1, 2, 3]
    assert units.has_clusters
    assert len(units) == 3
    v = normal(9)(1, 6)
    single = units.with_members(2, v, torch.ones(1).double())
    assert single.num_heads(2) == 1
    assert torch.equal(single.total[2], v[0])
    assert torch.equal(single.total[1], units.v[1].sum(0))
    assert units.num_heads(2) == 3, "units are not changed in place"
    assert not Units.single(v).has_clusters


def test_leverage_gives_every_head_its_own_size():
    units, P = clustered(), torch.eye(6, dtype=torch.float64)
    P[0, 0] = 0  # one direction is out of bounds
    for unit in range(3):
        present = units.v[unit, : units.num_heads(unit)]
        assert torch.allclose(present @ P @ units.leverage(P, unit), present.norm(dim=1), rtol=1e-9)
