"""A block with some hidden units against the whole block."""

from __future__ import annotations

import torch

from unmask.models.blocks import Attended
from unmask.models.hidden_units import keep_hidden_units


@torch.no_grad()
def test_units_are_those_of_the_whole(tiny_bert):
    units = torch.tensor([5, 0, 9])
    kept = keep_hidden_units(tiny_bert, units)
    assert kept is not None
    rows = torch.randn(2, 3, tiny_bert.width, generator=torch.Generator().manual_seed(1)).to(tiny_bert.dtype)
    whole = tiny_bert.mlp_hidden(0, Attended(*rows))
    torch.testing.assert_close(kept.mlp_hidden(0, Attended(*rows)), whole[:, units])
    torch.testing.assert_close(tiny_bert.mlp_hidden(0, Attended(*rows)), whole)  # left as it was


def test_units_that_are_no_linear_layer_of_their_own_are_not_taken_apart(tiny_gpt2):
    assert keep_hidden_units(tiny_gpt2, torch.tensor([0, 1])) is None
