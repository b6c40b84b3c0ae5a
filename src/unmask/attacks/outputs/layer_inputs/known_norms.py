"""The norm of each token is known: n equations more, which lead a search and tell the input from other pre-images.

    r(Z) = ( F(Z)·Z − Y,  w·(‖z_i‖² − ρ_i²)/2 ),   w = ‖Y‖/(‖ρ‖·mean ρ), so that both parts weigh the same

Tokens behind an RMS norm without gains have ρ_i = √d. An indefinite layer has many pre-images, and few starts reach any
of them from afar. With the norms Levenberg–Marquardt reaches the input from many starts, at sizes at which without them
none was found. Starts: attention to first order (`linalg/first_order_attention.py`), which has one solution for every
regular W, of the output with noise on its deviations, rows scaled to their norms; and noise with these norms, in turn.

A pre-image with other norms is refused. Two that agree in n norms are n coincidences, or related by a symmetry of the
layer, which keeps norms (`symmetries.py`). So a search does not end with the first root: a second one is looked for,
from images of the first under such symmetries and from as many fresh starts as any search needs. That none was found is
no proof, and the claim says so; noise in the output shows, as norms miss.

Notation: as in `problem.py`; ρ the norms, those of Z too, as Q is orthonormal.
Limits: sharp scores (size 3 at n = 16, d = 32): no start converges.
Cost: that of Levenberg–Marquardt for each start, eight at a time until one converges, and for some forty more.
Source: ours; measured in docs/paper-unmasking.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.preimages import merge_roots
from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem
from unmask.attacks.outputs.layer_inputs.starts import Search
from unmask.attacks.outputs.layer_inputs.symmetries import images
from unmask.linalg.first_order_attention import invert_first_order
from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt
from unmask.solvers.many_starts import ManyStarts

NEAR = 1e-4  # relative error of a norm that only other pre-images have
_CLOSE = 1e-6  # of ‖Y‖: from there Newton's method on the square system takes over
_NOISE = (0.03, 1.0)  # on the output's deviations, relative to their size
_AT_ONCE = 8
NUM_AFTER = 24  # starts that look for a second root after the first
_POLISHING = 30  # steps
_HALVINGS = 20  # of the error of the first order's solution: it is a start


@dataclass(frozen=True)
class NormedProblem:
    """The problem with one more equation for each row."""

    problem: AttentionProblem
    norms: Float[Tensor, " n"]

    @property
    def weight(self) -> float:
        """w: a relative error of all norms counts as much as the same one of Y."""
        return float(self.problem.Y.norm() / (self.norms.norm() * self.norms.mean()))

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k m+n"]:
        """What is missing of Y, and of the squared norms."""
        Z = xs.reshape(-1, *self.problem.Y.shape)
        missing = self.weight / 2 * (Z.square().sum(2) - self.norms.square())
        return torch.cat([self.problem.residuals(xs), missing], dim=1)

    def jacobians(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k m+n m"]:
        """Below those of the problem, row i has w·z_i at token i."""
        Z = xs.reshape(-1, *self.problem.Y.shape)
        k, n, r = Z.shape
        own = Z.new_zeros(k, n, n, r)
        own.diagonal(dim1=1, dim2=2).copy_(self.weight * Z.mT)
        return torch.cat([self.problem.jacobians(xs), own.reshape(k, n, n * r)], dim=1)


def norm_error(X: Float[Tensor, "n d"], norms: Float[Tensor, " n"]) -> float:
    """The largest relative error of a row's norm."""
    return float(((X.norm(dim=1) - norms).abs() / norms).max())


def normed_starts(
    problem: AttentionProblem, norms: Float[Tensor, " n"], num_starts: int, generator: torch.Generator
) -> Float[Tensor, "num_starts m"]:
    """Solutions of the first order and noise in turn, all rows with their norms; the first one is without noise."""
    Y = problem.Y
    noise = torch.randn(2, num_starts, *Y.shape, generator=generator, dtype=Y.dtype)
    low, high = map(math.log10, _NOISE)
    levels = torch.logspace(low, high, num_starts, dtype=Y.dtype)[:, None, None]
    levels[0] = 0
    size = (Y - Y.mean(0)).norm() / Y.numel() ** 0.5
    linear = invert_first_order(problem.W, Y + levels * size * noise[0], num_steps=_HALVINGS)
    usable = linear.isfinite().all(2).all(1)[:, None, None]
    is_linear = (torch.arange(num_starts) % 2 == 0)[:, None, None]
    starts = torch.where(usable & is_linear, linear, noise[1])
    return (starts * (norms / starts.norm(dim=2).clamp(min=1e-300))[:, :, None]).flatten(1)


def search_with_norms(
    problem: AttentionProblem,
    norms: Float[Tensor, " n"],
    *,
    known: Sequence[Float[Tensor, " m"]] = (),
    num_starts: int,
    tolerance: float,
    max_steps: int,
    generator: torch.Generator,
) -> Search:
    """Roots with these norms beside those known: eight starts at a time until some lead to one, then NUM_AFTER more."""
    size = float(problem.Y.norm())
    roots, num_tried = [x for x in known if norm_error(x.reshape(problem.Y.shape), norms) <= NEAR], 0
    num_known = len(roots)
    if not roots:
        for starts in normed_starts(problem, norms, num_starts, generator).split(_AT_ONCE):
            roots += _roots_with_norms(problem, norms, starts, tolerance, max_steps)
            num_tried += len(starts)
            if roots:
                break
    if roots:
        more = torch.cat([images(problem, roots[0]), normed_starts(problem, norms, NUM_AFTER, generator)])
        for starts in more.split(_AT_ONCE):
            roots += _roots_with_norms(problem, norms, starts, tolerance, max_steps)
        num_tried += len(more)
    return Search(merge_roots(roots, size), num_tried, len(roots) - num_known)


def _roots_with_norms(
    problem: AttentionProblem,
    norms: Float[Tensor, " n"],
    starts: Float[Tensor, "k m"],
    tolerance: float,
    max_steps: int,
) -> list[Tensor]:
    """What some starts lead to, a root for each that leads to one."""
    close = _CLOSE * float(problem.Y.norm())
    state = iterate(ManyStarts(close), NormedProblem(problem, norms), starts, max_steps=max_steps).state
    polished = [polish(problem, x, tolerance) for x in state.x[state.converged]]
    return [x for x in polished if x is not None and norm_error(x.reshape(problem.Y.shape), norms) <= NEAR]


def polish(problem: AttentionProblem, x: Float[Tensor, " m"], tolerance: float) -> Tensor | None:
    """The root of the square system next to a point, or None."""
    outcome = iterate(LevenbergMarquardt(tolerance), problem, x, max_steps=_POLISHING)
    return outcome.state.x if outcome.ending is Ending.CONVERGED else None
