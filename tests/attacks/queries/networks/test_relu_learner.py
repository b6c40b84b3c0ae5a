"""Learning by sweeps: noise is measured for what it is, peeling mends what a circle got wrong, polish sharpens."""

import pytest
import torch
from tests.attacks.queries.random_networks import normal, random_layers, relative

from unmask.attacks.queries.networks import relu_learner
from unmask.attacks.queries.networks.relu_learner import learn_network, measure_noise, polish
from unmask.attacks.queries.networks.relu_regions import Noise, Sweep, sweep
from unmask.linalg.relu import ReluNetwork


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("deviation", [1e-3, 1e-8])
def test_noise_is_measured(deviation):
    layers, draw = random_layers(8, 8), normal(1)
    noise = measure_noise(lambda x: layers(x) + deviation * draw(len(x)), 8, False, generator())
    assert deviation / 3 < noise.deviation < 3 * deviation


def test_exact_arithmetic_has_the_noise_of_its_last_digit():
    layers = random_layers(8, 8)
    noise = measure_noise(layers, 8, False, generator())
    assert 1e-17 < noise.deviation / noise.size < 1e-14
    single = measure_noise(lambda x: layers(x.float()).double(), 8, False, generator())
    assert 1e-8 < single.deviation / single.size < 1e-5


def learned(layers, seed=0, asked=None, biases=False):
    width = layers.hidden.shape[1]
    noise = measure_noise(asked or layers, width + biases, biases, generator(seed))
    return learn_network(asked or layers, width + biases, biases, noise, 1000, generator(seed)), noise


@pytest.mark.parametrize("seed", range(4))
def test_errors_are_what_the_blur_says(seed):
    layers = random_layers(12, 40, seed)
    found, noise = learned(layers, seed)
    x = normal(seed)(500, 12)
    assert len(found.network) == 40
    assert relative(found.network(x), layers(x)) < 10 * found.blur / noise.size
    assert found.blur / noise.size < 1e-7


def test_peeling_mends_a_first_circle_that_took_two_neurons_for_one(monkeypatch):
    layers = random_layers(8, 6, seed=2)
    num_sweeps = 0

    def spoiled(*arguments):
        nonlocal num_sweeps
        num_sweeps += 1
        found = sweep(*arguments)
        if num_sweeps > 1:
            return found
        network = found.network
        merged = torch.cat([network.normals[:1] + network.normals[1:2], network.normals[2:]])
        return Sweep(ReluNetwork(merged, network.signs[1:], network.linear), found.blur)

    monkeypatch.setattr(relu_learner, "sweep", spoiled)
    found, _ = learned(layers)
    x = normal(1)(200, 8)
    assert num_sweeps > 1
    assert relative(found.network(x), layers(x)) < 1e-8
    assert len(found.network) == 6


def test_parallel_and_idle_neurons_do_not_disturb():
    layers = random_layers(6, 4)
    hidden = torch.cat([layers.hidden, -2 * layers.hidden[:1], torch.zeros(1, 6)])
    output = torch.cat([layers.output, layers.output[:1], torch.ones(1)]).double()
    found, _ = learned(type(layers)(hidden, output))
    assert len(found.network) == 4


def test_polish_reaches_the_last_digits():
    layers = random_layers(8, 12, seed=1)
    found, noise = learned(layers, 1)
    better = polish(layers, found, noise, generator(5))
    x = normal(3)(200, 8)
    assert relative(better.network(x), layers(x)) < 2e-15 < relative(found.network(x), layers(x))
    assert better.blur < found.blur


def test_polish_does_not_hide_a_missing_neuron():
    layers = random_layers(8, 12, seed=1)
    found, noise = learned(layers, 1)
    network = found.network
    lacking = Sweep(ReluNetwork(network.normals[1:], network.signs[1:], network.linear), found.blur)
    assert polish(layers, lacking, noise, generator(5)) is lacking


def test_a_linear_function_has_no_neurons():
    found, _ = learned(random_layers(5, 1), asked=lambda x: x @ torch.arange(5.0).double())
    assert len(found.network) == 0
    assert torch.allclose(found.network.linear, 2 * torch.arange(5.0).double())
    assert found.blur <= Noise(1e-10, 1.0).deviation
