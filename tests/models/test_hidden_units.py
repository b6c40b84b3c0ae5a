"""A block with some hidden units against the whole block."""

from __future__ import annotations

import pytest
import torch

from unmask.models.blocks import Attended
from unmask.models.hidden_units import keep_hidden_units


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny_bert", "tiny_gpt2", "tiny_llama"])
def test_units_are_those_of_the_whole(name, request):
    model = request.getfixturevalue(name)
    units = torch.tensor([5, 0, 9])
    kept = keep_hidden_units(model, units)
    assert kept is not None
    rows = torch.randn(2, 3, model.width, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    whole = model.mlp_hidden(0, Attended(*rows))
    torch.testing.assert_close(kept.mlp_hidden(0, Attended(*rows)), whole[:, units])
    torch.testing.assert_close(model.mlp_hidden(0, Attended(*rows)), whole)  # left as it was


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_units_that_a_layer_lacks_are_not_taken_out_of_it(name, request):
    assert keep_hidden_units(request.getfixturevalue(name), torch.tensor([0, 10**6])) is None
