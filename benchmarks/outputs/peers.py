"""Other people's solvers on F(X)·X = Y, from the same start, with the same exact derivatives."""

from __future__ import annotations

import torch
from scipy.optimize import least_squares
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem


def scipy_least_squares(problem: AttentionProblem, method: str) -> Tensor:
    """scipy.optimize.least_squares with the closed-form Jacobian; 'trf' or 'lm'."""
    solution = least_squares(
        lambda x: problem.residuals(torch.from_numpy(x)[None])[0].numpy(),
        problem.Y.reshape(-1).numpy().copy(),
        jac=lambda x: problem.jacobian(torch.from_numpy(x)).numpy(),
        method=method,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
        max_nfev=200,
    )
    return torch.from_numpy(solution.x)


def torch_lbfgs(problem: AttentionProblem) -> Tensor:
    """torch.optim.LBFGS with strong Wolfe line search on ‖r‖²."""
    x = problem.Y.reshape(-1).clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [x],
        max_iter=2000,
        max_eval=4000,
        history_size=20,
        tolerance_grad=1e-14,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = problem.residuals(x[None]).square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return x.detach()


def autograd_newton(problem: AttentionProblem, max_steps: int = 50) -> Tensor:
    """Damped Newton on ‖r‖² with torch.func.hessian, its spectrum shifted to be positive."""

    def loss(x: Tensor) -> Tensor:
        return problem.residuals(x[None]).square().sum()

    x = problem.Y.reshape(-1).clone()
    value = loss(x)
    for _ in range(max_steps):
        if float(value) ** 0.5 <= 1e-12 * float(problem.Y.norm()):
            break
        H, g = torch.func.hessian(loss)(x), torch.func.grad(loss)(x)
        least = float(torch.linalg.eigvalsh(H)[0])
        H.diagonal().add_(max(0.0, 1e-6 - 1.5 * least) if least < 1e-12 else 0.0)
        step = torch.linalg.solve(H, -g)
        share = 1.0
        while share > 1e-6 and not loss(x + share * step) < value:
            share /= 2
        if share <= 1e-6:
            break
        x = x + share * step
        value = loss(x)
    return x


PEERS = {
    "scipy trf": lambda problem: scipy_least_squares(problem, "trf"),
    "scipy lm": lambda problem: scipy_least_squares(problem, "lm"),
    "torch LBFGS": torch_lbfgs,
    "torch.func.hessian Newton": autograd_newton,
}
