"""Newton–Krylov: as Newton, without matrices; stalls of the linear solver are told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.newton_krylov import NewtonKrylov

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Products:
    """J = A + 0.3·diag(cos x), preconditioned by diag(A)⁻¹."""

    A: Tensor
    x: Tensor

    def jvp(self, u: Tensor) -> Tensor:
        return self.A @ u + 0.3 * self.x.cos() * u

    def precondition(self, r: Tensor) -> Tensor:
        return r / self.A.diagonal()


@dataclass(frozen=True)
class Waves:
    """A x + 0.3·sin x − b."""

    A: Tensor
    b: Tensor
    preconditioned: bool = True

    def residuals(self, xs: Tensor) -> Tensor:
        return xs @ self.A.mT + 0.3 * xs.sin() - self.b

    def linearise(self, x: Tensor) -> Products | None:
        return Products(self.A, x) if self.preconditioned else None


def waves(size: int, seed: int = 0) -> tuple[Waves, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5 / 3
    A += torch.diag(torch.linspace(1, 100, size, dtype=A.dtype))
    root = torch.randn(size, generator=generator, dtype=A.dtype)
    return Waves(A, A @ root + 0.3 * root.sin()), root


@pytest.mark.parametrize("size", [1, 5, 200])
def test_the_root_is_found(size):
    system, root = waves(size)
    outcome = iterate(NewtonKrylov(1e-10), system, torch.zeros_like(root), max_steps=30)
    assert outcome.ending is Ending.CONVERGED
    assert float((outcome.state.x - root).norm()) < 1e-8  # ‖J⁻¹‖ < 10


def test_the_residual_falls_at_every_step():
    system, root = waves(50, seed=3)
    values = iterate(NewtonKrylov(1e-11), system, 5 * torch.ones_like(root), max_steps=30).values
    assert all(after < before for before, after in pairwise(values))


def test_a_linear_solver_that_stalls_is_told():
    # A cyclic shift is GMRES's worst case: nothing is gained before the last of `size` products.
    size = 40
    shift = torch.eye(size, dtype=torch.float64).roll(1, 0) * 1e3
    system = Waves(shift + 1e-9 * torch.eye(size), torch.eye(size, dtype=torch.float64)[0])
    solver = NewtonKrylov(1e-10, restart=5, max_restarts=2)
    outcome = iterate(solver, system, torch.zeros(size, dtype=torch.float64), max_steps=30)
    assert outcome.ending is Ending.STALLED
    assert outcome.state.linear_solve_stalled


def test_a_problem_without_preconditioner_ends_at_once():
    system, root = waves(5)
    outcome = iterate(NewtonKrylov(1e-10), Waves(system.A, system.b, False), torch.zeros_like(root), max_steps=30)
    assert outcome.ending is Ending.STALLED
    assert outcome.state.linear_solve_stalled


def test_a_start_that_is_a_root_stays():
    system, root = waves(5)
    assert iterate(NewtonKrylov(1e-9), system, root, max_steps=5).num_steps == 0
