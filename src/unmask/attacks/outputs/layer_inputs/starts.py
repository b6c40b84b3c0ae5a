"""Where to start from, and a search from many starts that says how much it could see.

    near    Y + noise of half its size          from what the layer handed out
    far     noise of one to six times its size  from nowhere in particular
    unmixed F⁻¹Y, F a random softmax            from weights instead of inputs

A search that finds one root has shown little if few of its starts converged. So a search counts them: if all of N
independent starts lead to one root, the others' share of the starts is below 3/N with 95 % confidence (rule of three).
That is evidence of uniqueness, not a proof.

Notation: as in `problem.py`.
Limits: roots whose basins are small are missed; they are those with an ill-conditioned Jacobian, where few starts
converge at all.
Cost: small systems in one batch of Levenberg–Marquardt; large ones one by one, without matrices.
Source: ours; `benchmarks/outputs/solvers.py` measures how often a second root is missed.
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
from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.many_starts import BatchedSystem, ManyStarts
from unmask.solvers.newton_krylov import NewtonKrylov

_NEAR = 0.5  # noise, relative to the output's root mean square
_FAR = (1.0, 6.0)  # tokens are longer than outputs where they are mixed much, nobody knows by how much
_LONGEST = 2.0  # of unmixed starts, relative to the output
_LOGITS = 2.0  # spread of the random weights' logits
_BATCH_NUMBERS = 2**24  # entries of all Jacobians of a batch: 128 MB


@dataclass(frozen=True)
class Search:
    """Distinct roots, and how many of the starts led to one."""

    roots: tuple[Float[Tensor, " m"], ...]
    num_starts: int
    num_converged: int

    @property
    def power(self) -> float:
        """The share of starts that converged: a search with little power says little about other roots."""
        return self.num_converged / self.num_starts if self.num_starts else 0.0


def random_starts(
    problem: AttentionProblem, num_starts: int, generator: torch.Generator, *, unmixed: bool = True
) -> Float[Tensor, "num_starts m"]:
    """Starts near, far and unmixed in turn; the last kind is left out of searches that cannot get anywhere from it."""
    Y = problem.Y
    noise = torch.randn(num_starts, *Y.shape, generator=generator, dtype=Y.dtype)
    noise = noise * (Y.norm() / Y.numel() ** 0.5)
    far = torch.logspace(math.log10(_FAR[0]), math.log10(_FAR[1]), num_starts, dtype=Y.dtype)
    kinds = [Y + _NEAR * noise, far[:, None, None] * noise]
    if unmixed:
        kinds.append(_unmix(Y, num_starts, generator))
    kind = torch.arange(num_starts) % len(kinds)
    return torch.stack(kinds)[kind, torch.arange(num_starts)].flatten(1)


def _unmix(Y: Float[Tensor, "n r"], num_starts: int, generator: torch.Generator) -> Float[Tensor, "num_starts n r"]:
    """F⁻¹Y for random weights F in which tokens see themselves; shortened where F is nearly singular."""
    n = len(Y)
    logits = _LOGITS * torch.randn(num_starts, n, n, generator=generator, dtype=Y.dtype)
    own = math.log(n) + 2 * _LOGITS * torch.rand(num_starts, 1, 1, generator=generator, dtype=Y.dtype)
    F = (logits + own * torch.eye(n, dtype=Y.dtype)).softmax(-1)
    X, info = torch.linalg.solve_ex(F, Y.expand(num_starts, *Y.shape))
    X = X * (_LONGEST * Y.norm() / X.norm(dim=(1, 2), keepdim=True)).clamp(max=1)
    return torch.where((info == 0)[:, None, None], X, Y)


def search_in_batches(
    problem: BatchedSystem, starts: Float[Tensor, "k m"], size: float, tolerance: float, max_steps: int
) -> Search:
    """All starts by Levenberg–Marquardt, as many at once as memory allows; `size` is that of a typical root."""
    roots: list[Tensor] = []
    at_once = max(1, _BATCH_NUMBERS // starts.shape[1] ** 2)
    for some in starts.split(at_once) if len(starts) else ():
        state = iterate(ManyStarts(tolerance), problem, some, max_steps=max_steps).state
        roots += state.x[state.converged].unbind()
    return Search(merge_roots(roots, size), len(starts), len(roots))


def search_without_matrices(
    problem: AttentionProblem, starts: Float[Tensor, "k m"], tolerance: float, max_steps: int
) -> Search:
    """Each start by Newton–Krylov; a start whose linear systems are too hard counts as not converged."""
    roots: list[Tensor] = []
    for start in starts:
        outcome = iterate(NewtonKrylov(tolerance), problem, start, max_steps=max_steps)
        if outcome.ending is Ending.CONVERGED:
            roots.append(outcome.state.x)
    return Search(merge_roots(roots, float(problem.Y.norm())), len(starts), len(roots))


def join_searches(searches: Sequence[Search], size: float) -> Search:
    """Several searches of one problem as one; the roots of the first come first."""
    roots = merge_roots([root for search in searches for root in search.roots], size)
    return Search(roots, sum(s.num_starts for s in searches), sum(s.num_converged for s in searches))
