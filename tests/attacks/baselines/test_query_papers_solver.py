import torch

from unmask.attacks.baselines.query_papers import least_nuclear_norm


def problem(d, rank, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, d, rank, generator=generator, dtype=torch.float64)
    X, Y = torch.randn(2, count, d, generator=generator, dtype=torch.float64)
    W = left @ right.T
    return W, X, Y, torch.einsum("ki,ij,kj->k", X, W, Y)


def test_a_matrix_of_low_rank_from_three_times_its_degrees_of_freedom():
    for seed in range(3):
        W, X, Y, b = problem(12, 1, 3 * 23, seed)
        found, steps = least_nuclear_norm(X, Y, b)
        assert steps < 3000
        assert (found - W).norm() <= 1e-8 * W.norm()  # the last step was below 1e-11, and convergence is linear


def test_measurements_are_met_and_no_norm_is_smaller():
    """Below the threshold something else is found; it still meets every measurement, with a norm not above W's."""
    W, X, Y, b = problem(10, 2, 40)
    found, _ = least_nuclear_norm(X, Y, b)
    assert torch.allclose(torch.einsum("ki,ij,kj->k", X, found, Y), b, rtol=0, atol=1e-9 * float(b.abs().max()))
    assert (found - W).norm() > 0.1 * W.norm()
    assert torch.linalg.matrix_norm(found, "nuc") < torch.linalg.matrix_norm(W, "nuc") * (1 + 1e-6)


def test_all_entries_are_a_linear_system():
    W, X, Y, b = problem(5, 5, 25)
    found, _ = least_nuclear_norm(X, Y, b)
    assert torch.allclose(found, W, atol=1e-6)


def test_steps_are_limited():
    _, X, Y, b = problem(10, 2, 60)
    assert least_nuclear_norm(X, Y, b, max_steps=3)[1] == 3
