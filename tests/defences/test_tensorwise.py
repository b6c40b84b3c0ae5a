"""Changing tensors: in the order of names, in float32 at least, with an error for what overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from tests.defences.updates import DTYPES, check_contract, copied, quick, random_update, same, updates

from unmask.defences.tensorwise import change_tensors
from unmask.errors import InputError


@quick
@given(updates)
def test_nothing_is_lost_when_nothing_changes(evidence):
    check_contract(lambda e: change_tensors(e, lambda _, tensor: tensor), evidence)
    assert same(change_tensors(evidence, lambda _, tensor: tensor), evidence)


def test_tensors_come_in_the_order_of_names_and_stay_in_their_own():
    evidence = random_update()
    turned = replace(evidence, gradients=dict(reversed(evidence.gradients.items())))
    seen = []
    changed = change_tensors(turned, lambda name, tensor: seen.append(name) or tensor)
    assert seen == sorted(evidence.gradients)
    assert list(changed.gradients) == list(turned.gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_change_is_computed_in_float32_at_least(dtype):
    seen = set()
    changed = change_tensors(random_update(dtype=dtype), lambda _, tensor: seen.add(tensor.dtype) or tensor)
    assert seen == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert {tensor.dtype for tensor in changed.gradients.values()} == {dtype}


def test_what_overflows_is_refused_by_name():
    evidence = random_update(dtype=torch.float16)
    with pytest.raises(InputError, match=r"'h\.0\.attn\.c_attn\.bias' beyond 65504, the largest number of .*float16"):
        change_tensors(evidence, lambda _, tensor: tensor * 1e6)


def test_a_tensor_with_a_graph_is_taken_without_it():
    evidence = random_update()
    for tensor in evidence.gradients.values():
        tensor.requires_grad_()
    changed = change_tensors(copied(evidence), lambda _, tensor: 2 * tensor)
    assert not any(tensor.requires_grad for tensor in changed.gradients.values())
