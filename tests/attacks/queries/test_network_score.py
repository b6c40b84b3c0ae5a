"""Network scores: unchanged by what no query can tell, and by nothing else."""

import math

import pytest
import torch
from tests.attacks.queries.network_score import score_network
from tests.attacks.queries.random_networks import random_layers, relu_network

from unmask.errors import InputError
from unmask.linalg.relu import ReluNetwork


def test_the_same_network_in_another_order_scaling_and_splitting_is_perfect():
    layers = random_layers(6, 5)
    order, factor = torch.tensor([3, 1, 0, 4, 2]), torch.tensor([2.0, 0.5, 1.0, 3.0, 1.0]).double()
    hidden = (layers.hidden * factor[:, None])[order]
    output = (layers.output / factor)[order]
    split = relu_network(torch.cat([hidden, hidden[:1]]), torch.cat([output[:1] / 3, output[1:], output[:1] * 2 / 3]))
    score = score_network(split, layers.described)
    assert max(score.function_error, score.worst_normal_error, score.linear_error) < 1e-14
    assert (score.num_true, score.num_missing, score.num_extra) == (5, 0, 0)


def test_a_missing_an_extra_and_a_wrong_neuron_are_seen():
    network = random_layers(6, 5).described
    missing = score_network(ReluNetwork(network.normals[1:], network.signs[1:], network.linear), network)
    assert (missing.num_missing, missing.num_extra, missing.worst_normal_error) == (1, 0, 1.0)
    assert missing.function_error > 0.01
    extra = score_network(network, ReluNetwork(network.normals[1:], network.signs[1:], network.linear))
    assert (extra.num_missing, extra.num_extra) == (0, 1)
    single = ReluNetwork(network.normals[:1], network.signs[:1], network.linear)
    flipped = ReluNetwork(network.normals[:1], -network.signs[:1], network.linear)
    assert score_network(flipped, single).num_missing == 1
    moved = ReluNetwork(network.normals * 1.001, network.signs, network.linear)
    assert score_network(moved, network).worst_normal_error == pytest.approx(1e-3)


def test_the_side_of_a_normal_does_not_count():
    network = random_layers(6, 5, biases=True).described
    assert score_network(ReluNetwork(-network.normals, network.signs, network.linear, True), network).num_missing == 0


def test_what_is_not_known_scores_infinity():
    network = random_layers(4, 3).described
    unknown = ReluNetwork(torch.zeros(0, 4), torch.zeros(0), torch.full((4,), math.nan))
    assert score_network(unknown, network).function_error == math.inf


def test_other_inputs_are_refused():
    with pytest.raises(InputError, match="must have the inputs of true"):
        score_network(random_layers(4, 3).described, random_layers(5, 3).described)
