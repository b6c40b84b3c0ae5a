"""ReLU networks described by kinks: the same function, the shortest form, the way back to layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.random_networks import even_layers, normal, random_layers, relative, relu_network

from unmask.errors import InputError
from unmask.linalg.relu import ReluNetwork, canonical_relu

quick = settings(max_examples=25)
seeds = st.integers(0, 2**31)
ROUNDING = 1e-13  # sums of some dozens of float64 products


@quick
@given(seeds, st.integers(1, 6), st.integers(0, 9), st.booleans())
def test_the_description_has_the_function_of_the_layers(seed, width, num_neurons, biases):
    layers = random_layers(width, num_neurons, seed, biases)
    x = normal(seed + 1)(50, width)
    assert torch.allclose(layers.described(x), layers(x), atol=ROUNDING)


@quick
@given(seeds, st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_the_way_back_to_layers_keeps_the_function(seed, width, num_neurons, biases):
    network = random_layers(width, num_neurons, seed, biases).described
    B, a = network.layers()
    x = normal(seed + 1)(50, width)
    seen = torch.cat([x, torch.ones(50, 1)], dim=1).double() if biases else x
    assert torch.allclose((seen @ B.T).relu() @ a, network(x), atol=1e-10)
    assert len(B) <= num_neurons + 2


@quick
@given(seeds)
def test_orientation_is_found_up_to_as_many_neurons_as_inputs(seed):
    """§4.1: ℓ = Σ ±n_j has one solution while normals are independent."""
    layers = random_layers(8, 6, seed)
    network = layers.described
    flipped = torch.where(normal(seed)(6) > 0, 1.0, -1.0).double()
    network = ReluNetwork(network.normals * flipped[:, None], network.signs, network.linear)
    assert torch.equal(network.orientation, flipped)
    B, _ = network.layers()
    assert torch.allclose(B / B.norm(dim=1, keepdim=True), layers.hidden / layers.hidden.norm(dim=1, keepdim=True))


def test_orientation_is_not_claimed_where_it_is_not_determined():
    assert random_layers(4, 5).described.orientation is None
    assert even_layers(8, 4).described.orientation is None  # normals in opposite pairs
    assert canonical_relu(even_layers(8, 4).described).orientation is None  # ℓ = 0 is no sum of ±n_j


@quick
@given(seeds, st.floats(-2, 2).filter(lambda share: abs(share) > 0.1))
def test_parallel_neurons_are_one(seed, share):
    layers = random_layers(5, 4, seed)
    hidden = torch.cat([layers.hidden, share * layers.hidden[:1]])
    network = relu_network(hidden, torch.cat([layers.output, layers.output[:1]]))
    short = canonical_relu(network)
    x = normal(seed + 1)(50, 5)
    assert len(short) == 4
    assert relative(short(x), network(x)) < ROUNDING


def test_what_cancels_or_is_zero_is_dropped():
    layers = random_layers(5, 3)
    hidden = torch.cat([layers.hidden, layers.hidden[:1], torch.zeros(1, 5)])
    network = relu_network(hidden, torch.cat([layers.output, -layers.output[:1], torch.ones(1)]))
    short = canonical_relu(network)
    x = normal(1)(50, 5)
    assert len(short) == 2
    assert relative(short(x), network(x)) < ROUNDING
    assert len(canonical_relu(relu_network(torch.zeros(2, 5), torch.ones(2)))) == 0


def test_close_but_different_neurons_stay_two():
    hidden = torch.tensor([[1.0, 0.0], [1.0, 1e-5]])
    assert len(canonical_relu(relu_network(hidden, torch.ones(2)))) == 2
    assert len(canonical_relu(relu_network(hidden, torch.ones(2)), tolerance=1e-4)) == 1


def test_sums_of_networks_are_sums_of_functions():
    one, two = random_layers(5, 3, 1).described, random_layers(5, 4, 2).described
    x = normal(1)(20, 5)
    assert torch.allclose((one + two)(x), one(x) + two(x))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="normals must be"):
        ReluNetwork(torch.zeros(3, 4), torch.zeros(2), torch.zeros(4))
    with pytest.raises(InputError, match="hidden_bias is None"):
        relu_network(torch.zeros(3, 4), torch.zeros(3), output_bias=1.0)
