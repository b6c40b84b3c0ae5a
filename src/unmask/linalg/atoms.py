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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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

    `is_full` if room ran out first: then nothing was explained.
    """

    chosen: tuple[int, ...]
    gains: Float[Tensor, " k"]
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
) -> Explanation:
    """Atoms that explain the matrix up to gains that noise has, from `start` on; `nuisance` is orthonormal.

    An atom is chosen while its gain's score is above `score`.
    """
    least = least_gain(score, matrix.shape[1])
    scatter = matrix @ matrix.T
    most = int(_FULL * len(scatter)) - nuisance.shape[1]
    chosen, gains = _backward(list(start)[: max(0, most)], atoms, scatter, nuisance, least)
    basis = joint_basis(atoms[chosen].double(), nuisance)
    seen: set[frozenset[int]] = set()
    for _ in range(_MAX_ROUNDS):
        others = dictionary_gains(atoms, scatter, basis)
        if float(others.max()) <= least:
            break
        if len(chosen) >= most:
            return Explanation(tuple(chosen), gains, basis, is_full=True)
        best = others.topk(min(_SHORTLIST, len(others))).indices
        batch = min(max(_FIRST_BATCH, len(chosen)), most - len(chosen))
        added = _forward(atoms[best].double(), scatter, basis, batch, least)
        chosen, gains = _backward([*chosen, *best[added].tolist()], atoms, scatter, nuisance, least)
        basis = joint_basis(atoms[chosen].double(), nuisance)
        if frozenset(chosen) in seen:  # what was added was put back
            break
        seen.add(frozenset(chosen))
    return Explanation(tuple(chosen), gains, basis)


def dictionary_gains(atoms: Float[Tensor, "v d"], scatter: Float[Tensor, "d d"], basis: Basis) -> Float[Tensor, " v"]:
    """The gain of every atom given a basis: xᵀRx/‖x outside‖²; zero where too little is left outside."""
    rest = _outside_of(scatter, basis).to(atoms.dtype)
    directions = basis.to(atoms.dtype)
    energies, norms = [], []
    for part in atoms.split(_AT_ONCE):
        energies.append(((part @ rest) * part).sum(1))
        norms.append(part.square().sum(1) - (part @ directions).square().sum(1))
    return _ratio(torch.cat(energies).double(), torch.cat(norms).double())


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
) -> tuple[list[int], Float[Tensor, " k"]]:
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
            return chosen, gains
        chosen = chosen[:worst] + chosen[worst + 1 :]
    return chosen, scatter.new_zeros(0)


def _ratio(energies: Tensor, norms: Tensor) -> Tensor:
    enough = norms > _LEAST_OUTSIDE
    return torch.where(enough, energies / norms.clamp_min(_LEAST_OUTSIDE), torch.zeros_like(energies))
