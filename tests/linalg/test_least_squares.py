import torch

from unmask.linalg.least_squares import polish_equations


def exponentials(t, values):
    def equations(x):
        a, b = x.reshape(2, -1)
        parts = torch.exp(-t[:, None] * b)
        return parts @ a - values, torch.cat([parts, -a * t[:, None] * parts], dim=1)

    return equations


def test_a_zero_residual_is_reached_to_the_last_digits():
    t = torch.linspace(0, 3, 40, dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    values = exponentials(t, torch.zeros_like(t))(x)[0]
    found = polish_equations(exponentials(t, values), torch.tensor([0.8, 1.5, 0.4, 2.0], dtype=torch.float64))
    assert float((found.x - x).abs().max()) < 1e-12
    assert found.deviation < 1e-15


def test_the_deviation_is_the_noise_of_an_equation():
    t = torch.linspace(0, 3, 400, dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    noise = 1e-3 * torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = exponentials(t, torch.zeros_like(t))(x)[0] + noise
    found = polish_equations(exponentials(t, values), x, damping=1e-8)
    assert 0.8e-3 < found.deviation < 1.2e-3


def test_a_start_at_the_solution_stays():
    t = torch.linspace(0, 3, 10, dtype=torch.float64)
    x = torch.tensor([1.0, 0.5], dtype=torch.float64)
    values = exponentials(t, torch.zeros_like(t))(x)[0]
    assert torch.equal(polish_equations(exponentials(t, values), x).x, x)
