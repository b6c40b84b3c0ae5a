"""Which atoms of a known dictionary a noisy matrix is made of: M = Aᵀ·Δ + Zᵀ·B + E, with Δ unknown and few rows of A.

    forward   ← the atom t with the largest gain ‖Mᵀq‖², q = the unit vector of t's part outside of all chosen ones
    backward  ← chosen atoms whose gain, given all the others, is no more than noise, are put back
    until no atom of the dictionary gains more than noise would

E being white, the gain of an atom that does not occur is χ² with m degrees of freedom once all that occur are chosen.
So an atom is seen from a gain of about m + z·√(2m) on, far below the noise edge (√d + √m)² of the spectrum, and near
atoms are told apart because each is measured outside of the others.

Notation: M (d, m) whitened; S = M·Mᵀ; atoms of norm 1 as rows, (v, d); Z nuisance directions, always explained; R the
scatter S outside of what is chosen.
Limits: fewer atoms than d. E must be white: unexplained signal is taken for atoms.
Cost: one pass over the dictionary, v·d² multiplications, for every doubling of the number of atoms.
Source: orthogonal least squares for several right-hand sides (Chen, Billings, Luo 1989; Cotter et al. 2005); the cube
root of χ² by Wilson, Hilferty 1931.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.progress import tell
from unmask.shapes import Basis

# Of an atom's squared norm: what is left outside of the chosen ones must be more, or its direction is rounding.
_LEAST_OUTSIDE = 1e-5
_AT_ONCE = 2**13  # atoms of the dictionary: a temporary of (2**13, d)
_SHORTLIST = 2048  # atoms of largest gain that one round of the forward search looks at
_FIRST_BATCH = 16  # atoms added before the dictionary is passed again; later as many as are chosen
_MAX_ROUNDS = 30
_FULL = 0.9  # share of the d directions that may be explained


@dataclass(frozen=True)
class Explanation:
    """Chosen atoms, the gain of each given all others, and an orthonormal basis of their span and the nuisance's.

    `own`: the unit vector of each atom's part outside of all others. `is_full` if room ran out first, or it was ended
    as hopeless: then nothing was explained.
    """

    chosen: tuple[int, ...]
    gains: Float[Tensor, " k"]
    own: Float[Tensor, "k d"]
    basis: Basis
    is_full: bool = False


def chi_square_score(gains: Float[Tensor, "*n"], m: int) -> Float[Tensor, "*n"]:
    """The normal score of a χ² variable with m degrees of freedom: its cube root is nearly normal."""
    variance = 2 / (9 * m)
    return ((gains.clamp_min(0) / m) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)


def least_gain(score: float, m: int) -> float:
    """The gain whose score is this."""
    variance = 2 / (9 * m)
    return m * (1 - variance + score * math.sqrt(variance)) ** 3


def explain(
    atoms: Float[Tensor, "v d"],
    matrix: Float[Tensor, "d m"],
    nuisance: Basis,
    score: float,
    start: Sequence[int] = (),
    is_hopeless: Callable[[Sequence[int]], bool] = lambda chosen: False,
) -> Explanation:
    """Atoms that explain the matrix up to gains that noise has, from `start` on; `nuisance` is orthonormal.

    An atom is chosen while its gain's score is above `score`, and while `is_hopeless` does not end it.
    """
    least = least_gain(score, matrix.shape[1])
    scatter = matrix @ matrix.T
    most = int(_FULL * len(scatter)) - nuisance.shape[1]
    chosen, gains, own = _backward(list(start)[: max(0, most)], atoms, scatter, nuisance, least)
    basis = joint_basis(atoms[chosen].double(), nuisance)
    seen: set[frozenset[int]] = set()
    for _ in range(_MAX_ROUNDS):
        tell("explaining the update by tokens", min(len(chosen), most), most)
        others = dictionary_gains(atoms, scatter, basis)
        if float(others.max()) <= least:
            break
        if len(chosen) >= most or is_hopeless(chosen):
            return Explanation(tuple(chosen), gains, own, basis, is_full=True)
        best = others.topk(min(_SHORTLIST, len(others))).indices
        batch = min(max(_FIRST_BATCH, len(chosen)), most - len(chosen))
        added = _forward(atoms[best].double(), scatter, basis, batch, least)
        chosen, gains, own = _backward([*chosen, *best[added].tolist()], atoms, scatter, nuisance, least)
        basis = joint_basis(atoms[chosen].double(), nuisance)
        if frozenset(chosen) in seen:  # what was added was put back
            break
        seen.add(frozenset(chosen))
    return Explanation(tuple(chosen), gains, own, basis)


def rival_gains(
    atoms: Float[Tensor, "v d"], explanation: Explanation, matrix: Float[Tensor, "d m"]
) -> Float[Tensor, " k"]:
    """For each chosen atom t the largest gain of one that was not chosen in its place, the other chosen ones kept.

    With q_t the part of t that is its own, and u' the part of u outside of all chosen: without t, u has the part
    u' + q_t·(q_tᵀu), so that its gain is (u'ᵀSu' + 2·(q_tᵀu)·(u'ᵀSq_t) + (q_tᵀu)²·q_tᵀSq_t) / (‖u'‖² + (q_tᵀu)²).
    Half the difference to t's own gain is the logarithm of how much likelier t makes the matrix than u does.
    """
    own, basis, scatter = explanation.own, explanation.basis, matrix @ matrix.T
    images = own @ scatter
    images = (images - (images @ basis) @ basis.T).to(atoms.dtype)
    others = torch.ones(len(atoms), dtype=torch.bool, device=atoms.device)
    others[[atom for atom in explanation.chosen if atom < len(atoms)]] = False
    best = torch.zeros_like(explanation.gains)
    rest = _outside_of(scatter, basis)
    for part in atoms[others].split(_AT_ONCE):
        energies, norms = _energies(part, rest, basis)
        along, cross = (part @ own.T.to(part)).double(), (part @ images.T).double()  # (u, k)
        energies = energies[:, None] + 2 * along * cross + along.square() * explanation.gains
        best = torch.maximum(best, _ratio(energies, norms[:, None] + along.square()).amax(0))
    return best


def dictionary_gains(atoms: Float[Tensor, "v d"], scatter: Float[Tensor, "d d"], basis: Basis) -> Float[Tensor, " v"]:
    """The gain of every atom given a basis: xᵀRx/‖x outside‖²; zero where too little is left outside."""
    rest = _outside_of(scatter, basis)
    return torch.cat([_ratio(*_energies(part, rest, basis)) for part in atoms.split(_AT_ONCE)])


def _energies(
    atoms: Float[Tensor, "v d"], rest: Float[Tensor, "d d"], basis: Basis
) -> tuple[Float[Tensor, " v"], Float[Tensor, " v"]]:
    """xᵀRx and ‖x outside‖² of atoms, in their precision: strong directions are not in R any more."""
    energies = ((atoms @ rest.to(atoms.dtype)) * atoms).sum(1)
    norms = atoms.square().sum(1) - (atoms @ basis.to(atoms.dtype)).square().sum(1)
    return energies.double(), norms.double()


def joint_basis(chosen: Float[Tensor, "k d"], nuisance: Basis) -> Basis:
    """An orthonormal basis of the nuisance and the atoms."""
    return torch.linalg.qr(torch.cat([nuisance, chosen.T], dim=1))[0] if len(chosen) else nuisance


def _outside_of(scatter: Float[Tensor, "d d"], basis: Basis) -> Float[Tensor, "d d"]:
    """(I − QQᵀ)·S·(I − QQᵀ)."""
    half = scatter - basis @ (basis.T @ scatter)
    rest = half - (half @ basis) @ basis.T
    return (rest + rest.T) / 2


def _forward(
    shortlist: Float[Tensor, "k d"], scatter: Float[Tensor, "d d"], basis: Basis, num_atoms: int, least: float
) -> list[int]:
    """Atoms added one by one, the largest gain first. One more direction q changes all gains by two products with q.

    In float64: strong directions exceed the noise by ten decades and are subtracted here.
    """
    rest = _outside_of(scatter, basis)
    outside = shortlist - (shortlist @ basis) @ basis.T
    energies, norms = ((outside @ rest) * outside).sum(1), outside.square().sum(1)
    added: list[int] = []
    frame = basis
    while len(added) < num_atoms:
        gains = _ratio(energies, norms)
        best = int(gains.argmax())
        if float(gains[best]) <= least:
            break
        added.append(best)
        direction = outside[best]
        for _ in range(2):  # twice is enough (Kahan)
            direction = direction - frame @ (frame.T @ direction)
        direction = direction / direction.norm()
        image = rest @ direction
        image = image - frame @ (frame.T @ image)
        along = outside @ direction
        energies = energies - 2 * along * (outside @ image) + along.square() * (direction @ rest @ direction)
        norms = norms - along.square()
        frame = torch.cat([frame, direction[:, None]], dim=1)
    return added


def _backward(
    chosen: list[int], atoms: Float[Tensor, "v d"], scatter: Float[Tensor, "d d"], nuisance: Basis, least: float
) -> tuple[list[int], Float[Tensor, " k"], Float[Tensor, "k d"]]:
    """Put back the atom of least gain given all the others, one after the other, while that is noise.

    ‖Mᵀq‖² with q the unit vector of an atom's part outside of all others is that gain; the q are the rows of the
    pseudo-inverse, scaled.
    """
    while chosen:
        outside = atoms[chosen].double()
        outside = outside - (outside @ nuisance) @ nuisance.T
        frame, factor = torch.linalg.qr(outside.T)
        rows = torch.linalg.solve_triangular(factor, frame.T, upper=True)
        directions = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
        gains = ((directions @ scatter) * directions).sum(1).nan_to_num(0.0)  # equal atoms have no part of their own
        worst = int(gains.argmin())
        if float(gains[worst]) > least:
            return chosen, gains, directions
        chosen = chosen[:worst] + chosen[worst + 1 :]
    return chosen, scatter.new_zeros(0), scatter.new_zeros(0, len(scatter))


def _ratio(energies: Tensor, norms: Tensor) -> Tensor:
    enough = norms > _LEAST_OUTSIDE
    return torch.where(enough, energies / norms.clamp_min(_LEAST_OUTSIDE), torch.zeros_like(energies))
