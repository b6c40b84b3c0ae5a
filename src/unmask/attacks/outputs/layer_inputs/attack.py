"""Inputs of one bare attention layer, from its weights and its output.

    reduce  ← V eliminated, X sought in the row space of Y (`problem.py`)
    solve   ← from X₀ = Y: dogleg or Newton–Krylov, else the fixed-point homotopy, else Levenberg–Marquardt
    search  ← many starts, to see whether the output has other pre-images (`starts.py`; causal: `causal_search.py`)
    certify ← Newton–Kantorovich for each pre-image (`preimages.py`)

What may be called RECOVERED: exactly one pre-image is known, it is certified, and either it is proved that there is no
other (one token; two tokens with a causal mask), or sym(W) ≻ 0, the signs of det J add up to the degree 1, and a search
from at least 24 starts, of which at least `least_power` converged, found no other; or its rows have the norms that are
known, no symmetry of the layer may give another such input (`symmetries.py`), and a search found none. The claim of the
certificate says which. Everything else that was found is PARTIAL: exact pre-images, of which the input may be one.

Notation: Y = B V⁺; W is the scores' matrix with their scale; n, d, r as in `problem.py`.
Limits: rank V = d. If sym(W) ≻ 0 *every* output has a pre-image, noise too: an exact pre-image of a noisy output is
not the input that the noise was added to. Indefinite W without a mask: nothing is found from afar at n = 16, d = 32,
unless the norms of the rows are known (`known_norms.py`).
Cost: docs/outputs-solvers.md. Source: ours, after arXiv 2310.12462's problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.causal_search import is_unseen, search_branches
from unmask.attacks.outputs.layer_inputs.claim import claim_preimages, refuse
from unmask.attacks.outputs.layer_inputs.known_norms import NEAR, norm_error, search_with_norms
from unmask.attacks.outputs.layer_inputs.preimages import Preimage, Preimages, certify, inverse_bound, merge_roots
from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, Posed, pose
from unmask.attacks.outputs.layer_inputs.starts import (
    Search,
    join_searches,
    random_starts,
    search_in_batches,
    search_without_matrices,
)
from unmask.attacks.outputs.layer_inputs.symmetries import may_have_image
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.outputs import AttentionEvidence
from unmask.recovery import Recovery
from unmask.solvers.homotopy import FixedPointHomotopy
from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt
from unmask.solvers.newton_krylov import NewtonKrylov
from unmask.solvers.trust_region import Dogleg

_SAME_NORMS = 1e-6  # relative error of the norms of a pre-image of an output that was not rounded
_POLISH = 1e-3  # of the tolerance; the last Newton step reaches the rounding floor


@dataclass(frozen=True)
class AttentionAttack:
    """Recover all inputs that one attention layer may have had.

    `tolerance`: of ‖F(X)X − Y‖/‖Y‖ while solving. `residual_tolerance`: of the recomputed output of what is claimed.
    `num_starts` starts of a search in batches, for up to `batch_limit` unknowns; `num_large_starts` of one without
    matrices, for more than `batch_from`. `dense_limit`: unknowns up to which J is built. `max_nodes`: rows solved in a
    causal search, each from `num_row_starts`. `least_power`, `least_row_power`: the share of starts that must converge
    before uniqueness is spoken of; rows are small, so more can be asked of them. `num_normed_starts`: where norms of
    rows are known, until one leads to a pre-image, at the most.
    """

    tolerance: float = 1e-12
    residual_tolerance: float = 1e-10
    num_starts: int = 160
    num_large_starts: int = 30
    num_row_starts: int = 144
    num_normed_starts: int = 64
    least_power: float = 0.8
    least_row_power: float = 0.95
    batch_from: int = 100
    batch_limit: int = 300
    dense_limit: int = 2500
    max_steps: int = 60
    max_nodes: int = 400
    seed: int = 0

    def __call__(self, evidence: AttentionEvidence, progress: Progress = silent) -> Recovery[Preimages]:
        """Run the attack; the evidence is left as it is."""
        return self.invert(pose(evidence), progress)

    def invert(self, posed: Posed, progress: Progress = silent) -> Recovery[Preimages]:
        """The same of evidence in which V is eliminated, whose output may have an error."""
        run = Run(self.seed, progress)
        refused = refuse(posed, self.residual_tolerance, run)
        if refused is not None:
            return refused
        problem = posed.problem()
        found = self._preimages(posed, problem, progress)
        if len(found) == 0 and not problem.is_exact:
            problem = posed.whole_problem()
            found = self._preimages(posed, problem, progress)
        least_power = self.least_row_power if problem.causal else self.least_power
        return claim_preimages(posed, problem, found, self.residual_tolerance, least_power, run)

    def solve(self, problem: AttentionProblem) -> Float[Tensor, " m"] | None:
        """A root from X₀ = Y, without any random number: the cheapest method that gets there."""
        start, tolerance = problem.Y.reshape(-1), self._absolute(problem)
        small = problem.size <= self.batch_limit  # there a factorisation costs less than GMRES
        methods: list[tuple[Any, int]] = [(Dogleg(tolerance), 30) if small else (NewtonKrylov(tolerance), 30)]
        if problem.size <= self.dense_limit:
            homotopy, damped = FixedPointHomotopy(tolerance), LevenbergMarquardt(tolerance)
            # Where sym(W) is not definite the homotopy's curve may run off, and mostly does.
            methods += [(homotopy, 150), (damped, 60)] if problem.is_definite else [(damped, 40)]
        for method, max_steps in methods:
            outcome = iterate(method, problem, start, max_steps=max_steps)
            if outcome.ending is Ending.CONVERGED:
                return outcome.state.x
        return None

    def _preimages(self, posed: Posed, problem: AttentionProblem, progress: Progress) -> Preimages:
        """Solve, search, polish and certify."""
        generator = torch.Generator().manual_seed(self.seed)
        size = float(problem.Y.norm())
        complete, cut = len(problem.Y) == 1, False
        if problem.causal:
            search, complete, cut = self._branches(problem, posed.norms, generator, progress)
        else:
            progress("solving from the output itself", 0, 2)
            first = self.solve(problem) if posed.norms is None or problem.is_definite else None
            progress("searching for other pre-images", 1, 2)
            own = Search(() if first is None else (first,), 0, 0)
            search = (
                own
                if self._is_beyond_proof(problem, first)
                else join_searches([own, self._search(problem, posed.norms, own.roots, generator)], size)
            )
        roots = merge_roots([self._polish(problem, root) for root in search.roots], size)
        found = [certify(posed, problem, root, self.dense_limit) for root in roots]
        exact = tuple(preimage for preimage in found if preimage.residual <= self.residual_tolerance)
        complete = complete and len(exact) == len(found)
        kept = tuple(preimage for preimage in exact if _has_norms(posed, preimage))
        return Preimages(
            kept,
            search.num_starts,
            search.num_converged,
            definite=problem.is_definite,
            proved_complete=complete,
            budget_ended=cut,
            unseen=problem.causal and any(is_unseen(posed.W, posed.Y, preimage.X) for preimage in kept),
            normed=posed.norms is not None,
            num_refused=len(exact) - len(kept),
            symmetric=any(may_have_image(posed, preimage.X) for preimage in kept),
        )

    def _is_beyond_proof(self, problem: AttentionProblem, root: Tensor | None) -> bool:
        """Whether a root is too large for a dense J and too mixed for the bound without one: no search helps it."""
        return root is not None and problem.size > self.dense_limit and inverse_bound(problem.point(root)) is None

    def _search(
        self, problem: AttentionProblem, norms: Tensor | None, known: tuple[Tensor, ...], generator: torch.Generator
    ) -> Search:
        """Other roots: large problems without matrices, small ones (and those that this fails on) in batches."""
        tolerance, size = self._absolute(problem), float(problem.Y.norm())
        if norms is not None and problem.size <= self.dense_limit:
            limits = {"num_starts": self.num_normed_starts, "max_steps": self.max_steps}
            return search_with_norms(problem, norms, known=known, tolerance=tolerance, generator=generator, **limits)
        search = Search((), 0, 0)
        if problem.size > self.batch_from and problem.is_definite:
            starts = random_starts(problem, self.num_large_starts, generator, unmixed=False)
            search = search_without_matrices(problem, starts, tolerance, self.max_steps)
        if problem.size > self.batch_limit or search.power >= self.least_power:
            return search
        starts = random_starts(problem, self.num_starts, generator)
        batch = search_in_batches(problem, starts, size, tolerance, self.max_steps)
        # How many converge is the batch's to say: the other method's failures are its own.
        return Search(join_searches([search, batch], size).roots, batch.num_starts, batch.num_converged)

    def _branches(
        self, problem: AttentionProblem, norms: Tensor | None, generator: torch.Generator, progress: Progress
    ) -> tuple[Search, bool, bool]:
        """The leaves of the causal search; whether they are proved to be all; whether the budget ended it.

        The power of the search is that of its weakest row.
        """
        branches = search_branches(
            problem,
            norms=norms,
            tolerance=self._absolute(problem),
            num_starts=self.num_row_starts,
            max_nodes=self.max_nodes,
            generator=generator,
            progress=progress,
        )
        leaves = merge_roots([leaf.reshape(-1) for leaf in branches.leaves], float(problem.Y.norm()))
        num_converged = round(branches.power * self.num_row_starts)
        return Search(leaves, self.num_row_starts, num_converged), branches.complete, branches.budget_ended

    def _polish(self, problem: AttentionProblem, root: Tensor) -> Tensor:
        """The last Newton steps; a point that does not get better is kept."""
        solver: Any = LevenbergMarquardt if problem.size <= self.dense_limit else NewtonKrylov
        return iterate(solver(_POLISH * self._absolute(problem)), problem, root, max_steps=2).state.x

    def _absolute(self, problem: AttentionProblem) -> float:
        return self.tolerance * float(problem.Y.norm())


def _has_norms(posed: Posed, preimage: Preimage) -> bool:
    """Whether the rows have the norms that are known, up to what rounding of the output does to them."""
    if posed.norms is None:
        return True
    rounded = preimage.inverse_norm * posed.value_condition * posed.rounding * float(posed.Y.norm() / posed.norms.min())
    return norm_error(preimage.X, posed.norms) <= min(NEAR, max(_SAME_NORMS, rounded))
