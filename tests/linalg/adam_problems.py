"""Small problems of Adam's channel: columns that are combinations of few atoms, trained for some steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.linalg.adam_channel import AdamSteps
from unmask.linalg.decoys import make_decoys
from unmask.linalg.sparse_posterior import SparsePosterior

NUM_ATOMS, WIDTH, NUM_COLUMNS = 200, 64, 16
EPSILON, BETAS = 1e-8, (0.9, 0.999)


@dataclass(frozen=True)
class AdamProblem:
    """Atoms, then decoys; the atoms used; the sums of steps and their errors."""

    dictionary: torch.Tensor
    used: frozenset[int]
    measured: torch.Tensor
    sigma: torch.Tensor
    steps: AdamSteps

    def posterior(self, measured: torch.Tensor | None = None) -> SparsePosterior:
        layers = [slice(0, NUM_COLUMNS // 2), slice(NUM_COLUMNS // 2, NUM_COLUMNS)]
        seen = self.measured if measured is None else measured
        return SparsePosterior(self.dictionary, seen, self.sigma, self.steps, layers)


def make_atoms(draw: torch.Generator) -> torch.Tensor:
    """Atoms that are alike, as a vocabulary is: a common part and uneven coordinates."""
    sizes = torch.logspace(0.3, -0.3, WIDTH)
    return sizes * (torch.randn(NUM_ATOMS, WIDTH, generator=draw) + 0.3 * torch.randn(WIDTH, generator=draw))


def make_problem(num_steps: int, num_used: int = 8, begins_at_zero: bool = False, seed: int = 0) -> AdamProblem:
    """Gradients of 1e-6 that drift by some per cent, through Adam's exact recursion, rounded to 1e-5 of a step."""
    draw = torch.Generator().manual_seed(seed)
    atoms = make_atoms(draw)
    used = torch.randperm(NUM_ATOMS, generator=draw)[:num_used]
    exact = AdamSteps(num_steps, begins_at_zero, num_steps, EPSILON, BETAS)  # a profile for each gradient
    shrink = 0.02 * 0.3 ** torch.arange(exact.num_profiles - 1).double()
    coefficients = 5e-7 * torch.randn(num_used, NUM_COLUMNS, exact.num_profiles, generator=draw, dtype=torch.float64)
    coefficients[..., 1:] *= shrink
    value, _ = exact(torch.einsum("nd,nmp->dmp", atoms[used].double(), coefficients))
    sigma = torch.full_like(value, 1e-5)
    measured = value + sigma * torch.randn(value.shape, generator=draw, dtype=torch.float64)
    dictionary = torch.cat([atoms, make_decoys(atoms, NUM_ATOMS, draw)])
    steps = AdamSteps(num_steps, begins_at_zero, 3, EPSILON, BETAS)
    return AdamProblem(dictionary, frozenset(used.tolist()), measured, sigma, steps)
