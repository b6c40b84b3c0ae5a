import math

import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head, rounded

from unmask.attacks.queries.many_heads.repeated_tokens import (
    HeadEquations,
    RepeatedTokens,
    TokenNorms,
    choose_copies,
    choose_norms,
)
from unmask.attacks.queries.profile import probe_oracle

WIDTH = 5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def asking(heads, length=12, **options):
    evidence = oracle_of(heads, **options)
    profile = probe_oracle(evidence, torch.Generator().manual_seed(0))
    return RepeatedTokens(evidence, profile, heads.v.sum(0), length, choose_copies(length, 7))


def test_repeated_tokens_answer_with_partial_fractions():
    """F(ρ) = Σ_h c_h·ρ/(ρ + e^{−t_h}) (arXiv 2608.03294), the last at ρ = ∞."""
    heads = random_head(WIDTH, num_heads=3)
    ask = asking(heads)
    U, y = normal(4, WIDTH), normal(WIDTH, seed=1)
    values, noise = ask(U, y)
    c, t = U @ heads.v.T, torch.einsum("bi,hij,j->bh", U, heads.W, y)
    rho = ask.rho[:-1]
    expected = torch.stack([(c * r / (r + (-t).exp())).sum(1) for r in rho], dim=1)
    assert torch.allclose(values[:, :-1], expected, atol=1e-14)
    assert torch.allclose(values[:, -1], c.sum(1))
    assert ((values[:, :-1] - expected).square().mean(1).sqrt() <= noise).all()


@pytest.mark.parametrize(("length", "num"), [(64, 28), (64, 9), (8, 7), (8, 100), (2, 1)])
def test_copies_differ_and_reach_both_ends(length, num):
    copies = choose_copies(length, num)
    assert len(set(copies)) == len(copies) == min(num, length - 1)
    assert set(copies) <= set(range(1, length))
    assert {1, length - 1} <= set(copies)


@pytest.mark.parametrize("is_exact", [True, False])
def test_norms_keep_their_product_and_the_bound(is_exact):
    tokens = TokenNorms.within(4.0, 10.0, is_exact)
    assert tokens.u_norm * tokens.y_norm == pytest.approx(4.0)
    assert tokens.u_norm + tokens.y_norm <= 10.0 * (1 + 1e-12)
    assert tokens.boost == pytest.approx(math.sqrt(tokens.u_norm / tokens.y_norm))
    assert (tokens.boost > 2) is not is_exact


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_scores_are_of_the_order_of_one_at_any_scale(scale):
    heads = random_head(WIDTH, num_heads=2)
    heads.W.mul_(scale)
    tokens = choose_norms(asking(heads, 64), 2, 1e6, torch.Generator().manual_seed(1))
    typical = tokens.u_norm * tokens.y_norm * float(heads.W.norm() / math.sqrt(2)) / WIDTH
    assert 0.3 < typical < 10


def test_what_the_bound_does_not_allow_is_not_asked():
    heads = random_head(WIDTH)
    heads.W.mul_(1e-2)
    tokens = choose_norms(asking(heads, 64, max_norm=1.0), 2, 1.0, torch.Generator().manual_seed(1))
    assert tokens.u_norm + tokens.y_norm == pytest.approx(1.0)


def equations(num_heads=2, noise=0.0):
    heads = random_head(WIDTH, num_heads=num_heads)
    U, Y, log_rho = normal(60, WIDTH), normal(60, WIDTH, seed=1), torch.linspace(-3, 3, 8, dtype=torch.float64)
    t = torch.einsum("qi,hij,qj->hq", U, heads.W, Y)
    values = torch.einsum("hq,hqk->qk", heads.v @ U.T, torch.sigmoid(log_rho + t[:, :, None]))
    return heads, HeadEquations(log_rho, U, Y, values + noise * normal(*values.shape, seed=2), num_heads)


def test_the_jacobian_is_that_of_the_residuals():
    heads, system = equations()
    x = system.pack(heads.v, heads.W) + 0.1 * normal(2 * WIDTH * (WIDTH + 1), seed=3)
    automatic = torch.autograd.functional.jacobian(lambda x: system.residuals(x[None])[0], x)
    assert torch.allclose(system.jacobian(x), automatic, atol=1e-13)


def test_true_heads_solve_the_equations_and_are_found_again():
    heads, system = equations()
    x = system.pack(heads.v, heads.W)
    assert float(system.residuals(x[None]).abs().max()) < 1e-14
    v, W = system.unpack(x)
    assert torch.allclose(v, heads.v)
    assert torch.equal(W, heads.W)
    found = system.polish(heads.v + 0.02 * normal(2, WIDTH), heads.W + 0.02 * normal(2, WIDTH, WIDTH))
    assert float((found.W - heads.W).norm()) < 1e-12


def test_the_expected_error_is_that_which_happens():
    heads, system = equations(noise=1e-4)
    found = system.polish(heads.v, heads.W)
    errors = (found.W - heads.W).flatten(1).norm(dim=1)
    assert ((errors < 2 * found.W_error) & (errors > found.W_error / 2)).all()
    assert found.residual == pytest.approx(1e-4, rel=0.2)
    rivals = torch.stack([(W - found.W).flatten(1).norm(dim=1) for _, W in found.rivals])
    assert ((rivals.mean(0) < 1.5 * found.W_error) & (rivals.mean(0) > found.W_error / 1.5)).all()


def test_noise_of_a_rounding_oracle_is_seen():
    _, noise = asking(random_head(WIDTH), after=rounded(2))(normal(3, WIDTH), normal(WIDTH, seed=1))
    assert noise == pytest.approx(0.01 / math.sqrt(12), rel=0.5)
