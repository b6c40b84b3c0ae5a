import numpy as np

from unmask.linalg.poles import rational_poles


def test_the_poles_of_a_rational_function_are_found():
    z = np.exp(2j * np.pi * np.arange(40) / 40)
    poles = np.array([0.5, 0.3 + 0.4j, 1.5j])
    values = (1 / (z[:, None] - poles)).sum(1)
    found = rational_poles(z, values, 1e-12, 20)
    assert len(found) == 3
    assert max(np.abs(found - pole).min() for pole in poles) < 1e-12


def test_the_nearest_poles_of_tanh_are_found():
    x = np.linspace(-1, 1, 100)
    found = rational_poles(x.astype(complex), np.tanh(8 * x), 1e-13, 40)
    assert np.abs(found - 1j * np.pi / 16).min() < 1e-9


def test_a_constant_and_noise_below_the_tolerance_have_none():
    z = np.exp(2j * np.pi * np.arange(20) / 20)
    assert len(rational_poles(z, np.ones(20), 1e-12, 10)) == 0
    noise = 1e-6 * np.random.default_rng(0).normal(size=20)
    assert len(rational_poles(z, 1 + noise, 1e-4, 10)) == 0
