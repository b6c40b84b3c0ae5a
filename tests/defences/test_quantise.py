"""Coarse numbers: the grid, the promised error, and that zero stays zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from tests.defences.updates import (
    DTYPES,
    check_contract,
    evidence_of,
    flat,
    quick,
    random_update,
    same,
    seeded,
    updates,
)

from unmask.defences import quantise_bf16, quantise_fp8, quantise_fp16, quantise_int8
from unmask.errors import InputError


def stochastic(evidence, seed=0):
    return quantise_int8(evidence, seeded(seed))


ALL = (quantise_int8, stochastic, quantise_fp8, quantise_fp16, quantise_bf16)
each = pytest.mark.parametrize("quantise", ALL, ids=lambda quantise: quantise.__name__)
FLOAT32 = 2.0**-23  # results are rounded to float32, by half of this, relative to the entry


def pairs(before, after):
    return [(before.gradients[name].double(), after.gradients[name].double()) for name in before.gradients]


@each
@quick
@given(updates)
def test_contract(quantise, evidence):
    check_contract(quantise, evidence)


@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_stays(quantise, dtype):
    check_contract(quantise, random_update(dtype=dtype))


@each
@pytest.mark.parametrize("gradients", [{}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(0, 2)}])
def test_nothing_stays_nothing(quantise, gradients):
    evidence = evidence_of(gradients)
    assert same(quantise(evidence), evidence)


@each
@quick
@given(updates)
def test_zeros_stay_and_signs_do_not_turn(quantise, evidence):
    assert (flat(quantise(evidence)) * flat(evidence).sign() >= 0).all()
    assert not flat(quantise(evidence))[flat(evidence) == 0].any()


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_fp8, quantise_bf16])
@quick
@given(updates)
def test_twice_is_once(quantise, evidence):
    once = quantise(evidence)
    again = quantise(once)
    # The scale of the second time is the largest entry of the first, rounded to float32.
    torch.testing.assert_close(flat(again), flat(once), rtol=4 * FLOAT32, atol=1e-36)


@pytest.mark.parametrize("quantise", [quantise_int8, stochastic, quantise_fp8])
@quick
@given(updates)
def test_the_largest_entry_stays(quantise, evidence):
    for before, after in pairs(evidence, quantise(evidence)):
        if len(before):
            assert float(after.abs().max()) == pytest.approx(float(before.abs().max()), rel=FLOAT32)


@each
def test_a_tensor_of_the_smallest_numbers_stays_finite(quantise):
    """max|G|/127 of the smallest float32 would be zero in float32, and G/0 is no number."""
    evidence = evidence_of({"a": torch.tensor([1e-45, -1e-45, 0.0])})
    assert same(quantise(evidence), evidence) or quantise in (quantise_bf16, quantise_fp16)
    assert torch.isfinite(flat(quantise(evidence))).all()


# int8


def test_int8_by_hand():
    evidence = evidence_of({"a": torch.tensor([-127.0, 0.4, 0.6, 5.4, 100.5001])})
    assert flat(quantise_int8(evidence)).tolist() == [-127.0, 0.0, 1.0, 5.0, 101.0]


@quick
@given(updates)
def test_int8_errs_by_half_a_step_at_most_and_by_less_than_one_at_random(evidence):
    for quantise, share in ((quantise_int8, 0.5), (stochastic, 1.0)):
        for before, after in pairs(evidence, quantise(evidence)):
            if len(before):
                top = before.abs().max()
                assert ((after - before).abs() <= top * (share / 127 + FLOAT32)).all()


@pytest.mark.parametrize("quantise", [quantise_int8, stochastic])
def test_int8_has_255_levels(quantise):
    evidence = evidence_of({"a": torch.randn(10_000, generator=seeded())})
    levels = flat(quantise(evidence)) / flat(evidence).abs().max() * 127
    assert len(levels.round().unique()) <= 255
    torch.testing.assert_close(levels, levels.round(), rtol=2 * FLOAT32, atol=0)


def test_int8_scales_each_tensor_by_itself():
    weak = torch.randn(20, generator=seeded())
    alone = quantise_int8(evidence_of({"a": weak}))
    beside = quantise_int8(evidence_of({"a": weak, "b": 1e6 * weak}))
    assert torch.equal(alone.gradients["a"], beside.gradients["a"])


def test_stochastic_rounding_is_right_on_average():
    evidence = evidence_of({"a": torch.cat([torch.tensor([127.0]), torch.full((100_000,), 0.3)])})
    after = stochastic(evidence).gradients["a"]
    assert set(after.tolist()) == {127.0, 0.0, 1.0}
    # Five standard errors of √(0.3·0.7/100 000).
    assert float(after[1:].mean()) == pytest.approx(0.3, abs=0.0073)
    assert not flat(quantise_int8(evidence))[1:].any()


def test_stochastic_rounding_follows_its_generator():
    evidence = random_update()
    assert same(stochastic(evidence, 3), stochastic(evidence, 3))
    assert not same(stochastic(evidence, 3), stochastic(evidence, 4))


# fp8


def test_fp8_by_hand():
    """Three bits of mantissa: 8, 9, … 15 eighths of a power of two."""
    evidence = evidence_of({"a": torch.tensor([448.0, 1.0, 1.06, 1.07, -20.9, 2.0**-9, 2.0**-11])})
    assert flat(quantise_fp8(evidence)).tolist() == [448.0, 1.0, 1.0, 1.125, -20.0, 2.0**-9, 0.0]


@quick
@given(updates)
def test_fp8_errs_by_a_sixteenth_at_most(evidence):
    for before, after in pairs(evidence, quantise_fp8(evidence)):
        normal = before.abs() > before.abs().max() / 28672 if len(before) else before.bool()
        assert ((after - before).abs() <= before.abs() * (2.0**-4 + FLOAT32))[normal].all()


def test_fp8_loses_what_is_too_small():
    evidence = evidence_of({"a": torch.tensor([1.0, 0.99 / 458752, 1.01 / 458752])})
    assert (flat(quantise_fp8(evidence)) != 0).tolist() == [True, False, True]


# bf16


@quick
@given(updates)
def test_bf16_is_what_the_type_holds(evidence):
    for before, after in pairs(evidence, quantise_bf16(evidence)):
        assert torch.equal(after, after.bfloat16().double())
        # Half a unit of 2⁻⁷; numbers below 1e-37 are near the end of the range, where the grid is even.
        assert ((after - before).abs() <= before.abs() * 2.0**-8 + 1e-40).all()


def test_bf16_leaves_bfloat16_alone():
    evidence = random_update(dtype=torch.bfloat16)
    assert same(quantise_bf16(evidence), evidence)


def test_bf16_refuses_what_rounds_up_to_infinity():
    with pytest.raises(InputError, match="'a' beyond"):
        quantise_bf16(evidence_of({"a": torch.tensor([torch.finfo(torch.float32).max])}))
