"""Where a linear layer lives, and its weight as (d_in, d_out) whatever the family stores."""

from __future__ import annotations

import torch

from unmask.models.linear import LinearLayer, Role

STORED = torch.arange(12.0).reshape(3, 4)


def test_what_is_stored_as_d_out_d_in_is_turned():
    assert torch.equal(LinearLayer("w", stored_transposed=False).orient(STORED), STORED)
    assert torch.equal(LinearLayer("w", stored_transposed=True).orient(STORED), STORED.T)


def test_columns_are_those_of_the_output():
    assert torch.equal(LinearLayer("w", False, range(1, 3)).orient(STORED), STORED[:, 1:3])
    assert torch.equal(LinearLayer("w", True, range(2)).orient(STORED), STORED.T[:, :2])
    assert torch.equal(LinearLayer("w", False, (0, 3)).orient(STORED), STORED[:, [0, 3]])


def test_it_is_a_view_so_that_gradients_are_not_copied():
    oriented = LinearLayer("w", True, range(2)).orient(STORED)
    assert oriented.data_ptr() == STORED.data_ptr()


def test_every_role_of_every_family_names_a_parameter(tiny):
    for block in range(tiny.num_blocks):
        layers = [layer for role in Role if (layer := tiny.linear(role, block)) is not None]
        assert len(layers) >= len(Role) - 1
        assert all(layer.orient(tiny.parameter(layer.parameter)).shape[0] > 0 for layer in layers)
    inputs = {role: tiny.weight(role, 0).shape[0] for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MLP_IN)}
    assert set(inputs.values()) == {tiny.width}
