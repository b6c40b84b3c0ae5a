"""Gradient descent on the paper's loss at its best: V eliminated, reduced to the row space, tuned rates, many starts.

    X ← X − η·∇L (plain)   or Adam with a rate that falls along a cosine;   L = ‖F(X)·X − Y‖²

All rates and starts run in one batch. Best means: the pair of rate and start that ends nearest to the input, which no
adversary can know; the others lose more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from outputs.attention_layers import random_layer
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, pose
from unmask.attacks.outputs.layer_inputs.starts import random_starts
from unmask.scores.inputs import relative_error

RATES = {"gradient descent": (0.03, 0.1, 0.3, 1.0, 3.0), "Adam": (1e-3, 3e-3, 0.01, 0.03, 0.1)}
NUM_STARTS = 8  # the output itself, and seven of the search's
MAX_STEPS = 10_000
RIGHT = {"1e-2": 1e-2, "1e-4": 1e-4, "1e-8": 1e-8}
GRID = (("pd", 4, 8), ("pd", 8, 16), ("pd", 16, 32), ("gauss", 4, 8), ("gauss", 8, 16))


def measure_rivals(small: bool = False) -> Iterator[dict]:
    """One row for each family, size and method; ours solves the same problems (without its search and certificate)."""
    for family, n, d in GRID[:1] if small else GRID:
        layers = [random_layer(family, n, d, 1.0, 500 + seed) for seed in range(1 if small else 3)]
        for method in ("ours", *RATES):
            cells = [_solve(method, *layer, max_steps=200 if small else MAX_STEPS) for layer in layers]
            yield {
                "family": family,
                "n": n,
                "d": d,
                "method": method,
                "problems": len(cells),
                **{f"right_{name}": sum(cell["error"] <= level for cell in cells) for name, level in RIGHT.items()},
                "median_error": sorted(cell["error"] for cell in cells)[len(cells) // 2],
                "steps": sorted(cell["steps"] for cell in cells)[len(cells) // 2],
                "seconds": sorted(cell["seconds"] for cell in cells)[len(cells) // 2],
            }


def _solve(method: str, evidence, X: Tensor, max_steps: int) -> dict:
    """Error, steps and CPU seconds of one run: of the best of all runs, for descent."""
    problem = pose(evidence).problem()
    started = time.process_time()
    if method == "ours":
        x = AttentionAttack().solve(problem)
        seconds = time.process_time() - started
        return {"error": math.inf if x is None else relative_error(problem.lift(x), X), "steps": 0, "seconds": seconds}
    starts = random_starts(problem, NUM_STARTS, torch.Generator().manual_seed(0))
    starts[0] = problem.Y.reshape(-1)
    rates = torch.tensor(RATES[method], dtype=starts.dtype)
    batch = starts.repeat(len(rates), 1)
    found, steps = descend(problem, batch, rates.repeat_interleave(len(starts)), method == "Adam", max_steps)
    errors = [relative_error(problem.lift(x), X) if bool(x.isfinite().all()) else math.inf for x in found]
    best = min(range(len(errors)), key=errors.__getitem__)
    seconds = _seconds_a_step(problem, starts[:1], rates[:1], method == "Adam") * steps
    return {"error": errors[best], "steps": steps, "seconds": seconds}


def descend(problem: AttentionProblem, x: Tensor, rates: Tensor, adam: bool, max_steps: int) -> tuple[Tensor, int]:
    """The best points of each run, by its loss, after all steps."""
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    best, least = x.clone(), torch.full((len(x),), math.inf, dtype=x.dtype)
    size = float(problem.Y.norm())
    for step in range(1, max_steps + 1):
        losses, gradient = loss_and_gradient(problem, x)
        better = losses < least  # NaN is not
        best, least = torch.where(better[:, None], x, best), torch.where(better, losses, least)
        if float(least.min()) ** 0.5 <= 1e-13 * size:
            return best, step
        direction = gradient
        if adam:
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
            direction = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-15)
            direction = direction * (1 + math.cos(math.pi * step / max_steps)) / 2
        x = x - rates[:, None] * direction
    return best, max_steps


def loss_and_gradient(problem: AttentionProblem, xs: Tensor) -> tuple[Tensor, Tensor]:
    """‖F(X)X − Y‖² and 2(FᵀR + E·XWᵀ + Eᵀ·XW) of many points, e_ik = f_ik(r_iᵀx_k − r_iᵀx̄_i)."""
    X = xs.reshape(-1, *problem.Y.shape)
    F = problem.map.weights(X)
    R = F @ X - problem.Y
    slopes = R @ X.mT
    E = F * (slopes - (F * slopes).sum(-1, keepdim=True))
    gradient = F.mT @ R + E @ (X @ problem.W.mT) + E.mT @ (X @ problem.W)
    return R.square().sum((1, 2)), 2 * gradient.flatten(1)


def _seconds_a_step(problem: AttentionProblem, start: Tensor, rate: Tensor, adam: bool) -> float:
    """CPU seconds of one step of one run, alone."""
    started = time.process_time()
    _, steps = descend(problem, start, 0 * rate, adam, 200)
    return (time.process_time() - started) / steps
