"""Routing: each head reads the token that was meant for it, whatever the tokens are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.random_networks import normal, random_layers, random_transformer, relative

from unmask.attacks.queries.networks.routing import Routing


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([(1, 4), (2, 4), (2, 8), (3, 9), (3, 16)]))
def test_every_head_reads_its_own_token(seed, shape):
    num_heads, width = shape
    transformer = random_transformer(num_heads, width, random_layers(width, 6), seed)
    x = normal(seed)(5, num_heads, width)
    wanted = transformer.layers(torch.einsum("bhd,hde->be", x, transformer.V))
    found = Routing(transformer.evidence(), transformer.W, 1e-16)(x.flatten(1))
    assert relative(found, wanted) < 1e-10


def test_margins_are_as_large_as_the_precision_asks_for():
    W, x = normal(0)(2, 8, 8), normal(1)(3, 2, 8)
    y = Routing(random_transformer(2, 8, random_layers(8, 4)).evidence(), W, 1e-7).asking(x)
    scores = torch.einsum("bgd,hde,be->bhg", x, W, y)
    margin = 16.118 + 8  # log 1e7 + 8
    assert torch.allclose(scores[:, 0, 0] - scores[:, 0, 1], torch.full((3,), margin).double(), atol=1e-2)
    assert torch.allclose(scores[:, 1, 1] - scores[:, 1, 0], torch.full((3,), margin).double(), atol=1e-2)
    assert torch.allclose(scores[:, 1, 1], torch.full((3,), margin).double(), atol=1e-2)


def test_wrong_weights_do_not_route():
    transformer = random_transformer(2, 8, random_layers(8, 6))
    x = normal(2)(20, 2, 8)
    wanted = transformer.layers(torch.einsum("bhd,hde->be", x, transformer.V))
    found = Routing(transformer.evidence(), transformer.W.flip(0), 1e-16)(x.flatten(1))
    assert relative(found, wanted) > 0.1


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_routing_does_not_depend_on_the_length_of_tokens(scale):
    transformer = random_transformer(2, 8, random_layers(8, 6))
    routing, x = Routing(transformer.evidence(), transformer.W, 1e-16), normal(2)(5, 16)
    assert relative(routing(scale * x), scale * routing(x)) < 1e-10
