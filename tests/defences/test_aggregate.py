"""Secure aggregation: the sum of updates of one kind, and what differs when they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import DTYPES, check_contract, copied, evidence_of, flat, quick, random_update, same

from unmask.defences import secure_aggregate
from unmask.errors import InputError
from unmask.evidence import Task, Update


@quick
@given(st.integers(1, 6), st.sampled_from(DTYPES))
def test_it_is_the_sum(num_clients, dtype):
    clients = [random_update(seed, dtype) for seed in range(num_clients)]
    total = secure_aggregate(clients)
    expected = sum(flat(client) for client in clients).to(dtype).double()
    assert torch.equal(flat(total), expected)
    assert total.num_texts == 3 * num_clients
    assert total.num_clients == (None if num_clients == 1 else num_clients)
    assert replace(total, num_texts=3, num_clients=None, gradients={}) == replace(clients[0], gradients={})


def test_contract():
    others = [random_update(seed) for seed in (1, 2)]
    before = [copied(other) for other in others]
    check_contract(lambda e: replace(secure_aggregate([e, *others]), num_texts=3, num_clients=None), random_update())
    assert all(same(*pair) for pair in zip(others, before, strict=True))


def test_one_client_is_itself():
    evidence = random_update()
    assert same(secure_aggregate([evidence]), evidence)


def test_a_sum_of_sums_has_all_their_clients():
    one, other = (random_update(seed, num_clients=1) for seed in range(2))
    assert secure_aggregate([one]).num_clients == 1
    assert secure_aggregate([secure_aggregate([one, other]), other]).num_clients == 3


def test_the_order_of_clients_and_of_names_does_not_matter():
    clients = [random_update(seed, scale=10.0**seed) for seed in range(4)]
    turned = [replace(client, gradients=dict(reversed(client.gradients.items()))) for client in reversed(clients)]
    # Sums of float64 in another order, then rounded to float32.
    torch.testing.assert_close(flat(secure_aggregate(clients)), flat(secure_aggregate(turned)), rtol=2e-7, atol=0)


def test_small_updates_are_not_lost_beside_a_large_one():
    """1 + 100·2⁻²⁵ is 1 if it is added in float32."""
    clients = [evidence_of({"a": torch.tensor([value])}) for value in [1.0, *[2.0**-25] * 100]]
    assert float(secure_aggregate(clients).gradients["a"]) == pytest.approx(1 + 100 * 2.0**-25, abs=2.0**-24)


def test_what_one_client_does_not_say_is_unknown():
    one, silent = random_update(), random_update(1, num_texts=None, task=None)
    total = secure_aggregate([one, silent])
    assert (total.num_texts, total.task) == (None, None)
    assert secure_aggregate([one, random_update(1, task=Task.CLASSIFICATION)]).task is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_fingerprint": "a" * 64}, "fingerprint aaaaaaaaaaaa, not ffffffffffff"),
        ({"update": Update.GRADIENT}, "it is a gradient, not a delta"),
        ({"compute_dtype": torch.float32}, "computed in torch.float32, not in torch.bfloat16"),
        ({"gradients": {"a": torch.ones(2)}}, "it lacks 1 tensors .first: 'b'."),
        ({"gradients": {"a": torch.ones(2), "c": torch.ones(2)}}, "lacks 1 .*'b'.* and has 1 others .*'c'"),
        ({"gradients": {"a": torch.ones(2), "b": torch.ones(1, 2)}}, r"'b' has shape \(1, 2\), not \(2,\)"),
        ({"gradients": {"a": torch.ones(2), "b": torch.ones(2).double()}}, "'b' is of torch.float64, not of"),
    ],
)
def test_what_differs_is_said(change, message):
    evidence = evidence_of({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(InputError, match=f"update 3 cannot be added to update 1: .*{message}"):
        secure_aggregate([evidence, evidence, replace(evidence, **change)])


def test_no_update_is_refused():
    with pytest.raises(InputError, match="at least one update"):
        secure_aggregate([])


def test_a_sum_beyond_the_type_is_refused():
    evidence = evidence_of({"a": torch.tensor([6e4], dtype=torch.float16)})
    with pytest.raises(InputError, match="'a' beyond 65504"):
        secure_aggregate([evidence, evidence])
