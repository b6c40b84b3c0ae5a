"""Which atoms a matrix is made of, where every entry has an error of its own: Y = AᵀC + E, e_ij ~ N(0, σ_ij²).

    start     ← atoms by `pursuit.py`, in the metric that all columns share: the errors' mean, and the atoms not chosen
                yet as noise of the dictionary's own second moments; while their gains are beyond those of chance
    forward   ← the atom t with the largest gain Σ_j (q_tjᵀr_j)², r_j = y_j/σ_j less what is explained, and q_tj the
                unit vector of (a_t/σ_j)'s part outside of all atoms chosen
    backward  ← chosen atoms whose gain, given all the others, is no more than noise, are put back
    until no atom of the dictionary gains more than noise would

Atoms of a vocabulary are much alike, and the start tells them apart; then the errors of each entry count. Every column
has a metric of its own there, so no basis serves all of them; but all columns are updated by one product of the
dictionary with a (d, m) matrix. Entries of which nothing is known have σ = ∞.

Notation: m columns, k atoms chosen. The gain of an atom that does not occur is χ² with m degrees of freedom once all
that occur are chosen; χ²/n, what is left over the entries that are free, is 1 if the errors are what they are said to
be, and tells whether the atoms explain the matrix.
Limits: fewer atoms than entries known in a column. Cost: v·d·m multiplications for each atom.
Source: orthogonal least squares, Chen, Billings, Luo 1989, weighted; as `atoms.py`, whose errors are white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.atoms import least_gain
from unmask.linalg.pursuit import Pursuit, orthonormal
from unmask.progress import tell, track

_LEAST_OUTSIDE = 1e-5  # of an atom's squared norm in a column: less is rounding
_FRESH = 16  # atoms chosen between two computations of all products anew
_MAX_TURNS = 8
_HOPELESS, _AFTER = 0.7, 48  # of the matrix is left after so many atoms: it is made of none
_GROWS, _FITS = 2.0, 2.0  # times the gain of an atom that a later one may have; χ²/n of what is explained at most
_KNOWN = 0.3  # of a column's entries: with fewer it is not used for the start
_MEDIAN = 0.6745  # of a normal variable's size
_WEAKEST_COLUMN = 1e-3  # of the strongest
_FLOOR = 1e-4  # of a column: less is rounding
_BY_CHANCE = 6.0  # standard deviations that the best of 1e5 atoms may be above chance
_NEIGHBOURS = 64  # atoms nearest to a chosen one that may stand in its place


@dataclass(frozen=True)
class WeightedSupport:
    """Atoms chosen, the gain of each given all others, the best gain of another atom in its place, and χ²/n."""

    chosen: tuple[int, ...]
    gains: Float[Tensor, " k"]
    rivals: Float[Tensor, " k"]
    misfit: float
    is_full: bool


class WeightedPursuit:
    """The search; entries with an infinite `sigma` are not known."""

    def __init__(
        self, atoms: Float[Tensor, "v d"], matrix: Float[Tensor, "d m"], sigma: Float[Tensor, "d m"], score: float
    ) -> None:
        self.atoms = atoms
        self.weights = torch.where(sigma.isfinite(), 1 / sigma.double(), 0.0)
        self.measured = torch.where(sigma.isfinite(), matrix.double(), 0.0) * self.weights
        self._size = float(self.measured.square().sum())
        self.least = least_gain(score, matrix.shape[1])
        self.chosen: list[int] = []
        self._begin()

    def search(self, most: int, start: Sequence[int] = ()) -> WeightedSupport:
        """At most `most` atoms that explain the matrix, each of which gains more than noise would."""
        is_full = False
        if start:
            self.chosen = list(start)
            self._begin()
            self._backward()
        for _ in range(_MAX_TURNS):
            before = list(self.chosen)
            is_full = not self._forward(most)
            if not is_full:
                self._backward()
            if set(self.chosen) == set(before) or is_full:
                break
        misfit = self._squares() / max(1, self._free())
        if is_full:  # nothing is explained, so nobody asks what each atom gains
            nothing = self.measured.new_zeros(len(self.chosen))
            return WeightedSupport(tuple(self.chosen), nothing, nothing, misfit, is_full)
        gains, own = self._own_gains()
        return WeightedSupport(tuple(self.chosen), gains, self._rival_gains(own), misfit, is_full)

    def _squares(self) -> float:
        """What is left, in squared errors."""
        return float(self.rest.square().sum())

    def _free(self) -> int:
        """Entries that are known beyond those that the chosen atoms fit."""
        return int((self.weights > 0).sum()) - len(self.chosen) * self.weights.shape[1]

    def _begin(self) -> None:
        """Everything as if the chosen atoms were taken for the first time."""
        self.rest = self.measured.clone()
        self.basis = self.measured.new_zeros(self.measured.shape[1], len(self.measured), 0)  # (m, d, k)
        self.norms = self.atoms.square() @ self.weights.square().to(self.atoms)
        self.whole = self.norms.clone()
        self.products = self.atoms @ (self.weights * self.rest).to(self.atoms)
        again, self.chosen = self.chosen, []
        for atom in again:
            self._take(atom)

    def _forward(self, most: int) -> bool:
        """Atoms one by one while they gain more than noise; False if there are too many."""
        while True:
            gains = self._gains()
            best = int(gains.argmax())
            if float(gains[best]) <= self.least:
                return True
            if len(self.chosen) >= most or self._is_hopeless(most, float(gains[best])):
                return False
            tell("explaining the update by tokens", len(self.chosen), most)
            self._take(best)

    def _is_hopeless(self, most: int, gain: float) -> bool:
        """Whether atoms explain hardly anything, or as many as may follow cannot, at the gain of the next one."""
        number = len(self.chosen)
        if number < _FRESH:
            return False
        reachable = self._squares() - _GROWS * gain * (most - number)
        return reachable > _FITS * self._free() or (number == _AFTER and self._squares() > _HOPELESS * self._size)

    def _gains(self) -> Float[Tensor, " v"]:
        enough = self.norms > _LEAST_OUTSIDE * self.whole
        gains = torch.where(enough, self.products.square() / self.norms.clamp_min(1e-30), 0.0).sum(1)
        gains[self.chosen] = 0.0
        return gains

    def _take(self, atom: int) -> None:
        own = self._outside(self.weights * self.atoms[atom].double()[:, None], self.basis)
        explained = (own * self.rest).sum(0)
        self.rest = self.rest - own * explained
        self.basis = torch.cat([self.basis, own.T[:, :, None]], dim=2)
        along = self.atoms @ (self.weights * own).to(self.atoms)
        self.norms -= along.square()
        self.chosen.append(atom)
        if len(self.chosen) % _FRESH == 0:
            self.products = self.atoms @ (self.weights * self.rest).to(self.atoms)
        else:
            self.products -= along * explained.to(self.atoms)

    @staticmethod
    def _outside(rows: Float[Tensor, "d m"], basis: Float[Tensor, "m d k"]) -> Float[Tensor, "d m"]:
        """The unit vector of each column's part outside of its basis."""
        part = rows.T
        for _ in range(2):  # twice is enough (Kahan)
            part = part - torch.einsum("mdk,mk->md", basis, torch.einsum("mdk,md->mk", basis, part))
        return (part / part.norm(dim=1, keepdim=True).clamp_min(1e-300)).T

    def _backward(self) -> None:
        """Put back atoms whose gain given all the others is noise: the weaker half of them, until none is left."""
        before = len(self.chosen)
        while self.chosen:
            gains, _ = self._own_gains()
            weak = (gains <= self.least).nonzero()[:, 0]
            if not len(weak):
                break
            worst = set(weak[gains[weak].argsort()][: (len(weak) + 1) // 2].tolist())
            self.chosen = [atom for place, atom in enumerate(self.chosen) if place not in worst]
        if len(self.chosen) < before:
            self._begin()

    def _own_gains(self) -> tuple[Float[Tensor, " k"], Float[Tensor, "m k d"]]:
        """The gain of each chosen atom given all others, and the unit vectors of their own parts in each column."""
        rows = self.atoms[self.chosen].double()
        weighted = torch.einsum("kd,dm->mdk", rows, self.weights)
        frame, factor = torch.linalg.qr(weighted)
        own = torch.linalg.solve_triangular(factor, frame.transpose(1, 2), upper=True)
        own = (own / own.norm(dim=2, keepdim=True).clamp_min(1e-300)).nan_to_num(0.0)
        return torch.einsum("mkd,dm->mk", own, self.measured).square().sum(0), own

    def _rival_gains(self, own: Float[Tensor, "m k d"]) -> Float[Tensor, " k"]:
        """The best gain of an atom near a chosen one in the place of that, the other chosen ones kept."""
        best = torch.zeros(len(self.chosen), dtype=torch.float64, device=self.atoms.device)
        scale = self.weights.square().mean(1).sqrt().to(self.atoms)
        scaled = torch.nn.functional.normalize(self.atoms * scale, dim=1)
        taken = torch.tensor(self.chosen, dtype=torch.long, device=self.atoms.device)
        for place, atom in enumerate(track(self.chosen, "comparing tokens with their neighbours")):
            nearness = (scaled @ scaled[atom]).abs()
            nearness[taken] = 0.0
            near = nearness.topk(min(_NEIGHBOURS, len(nearness))).indices
            rows = torch.einsum("ud,dm->mud", self.atoms[near].double(), self.weights)
            rest = rows - torch.einsum("mdk,muk->mud", self.basis, torch.einsum("mdk,mud->muk", self.basis, rows))
            alone = own[:, place]  # (m, d)
            part = rest + torch.einsum("mud,md->mu", rows, alone)[:, :, None] * alone[:, None]
            explained = torch.einsum("mud,dm->mu", part, self.measured).square()
            gains = explained / part.square().sum(2).clamp_min(1e-300)
            best[place] = gains.sum(0).max()
        return best


def find_start(
    atoms: Float[Tensor, "v d"], matrix: Float[Tensor, "d m"], sigma: Float[Tensor, "d m"], most: int
) -> list[int]:
    """Atoms that explain the matrix in one metric for all columns, while they gain more than chance would."""
    moments = (atoms.T @ atoms).double() / len(atoms)
    sizes = moments.diagonal().sqrt()[:, None]
    known = sigma.isfinite()
    relative = torch.where(known, matrix.double().abs() / sizes.clamp_min(1e-300), math.nan)
    scales = relative.nanmedian(0).values / _MEDIAN
    used = (known.double().mean(0) > _KNOWN) & (scales > 0)  # a column that is zero for the most part has no scale
    if not bool(used.any()):
        return []
    scales = torch.where(used, scales, 1.0)
    errors = torch.where(known, sigma.double().square() / scales.square(), 2 * sizes.square())
    variances, axes = torch.linalg.eigh(moments + torch.diag(errors[:, used].mean(1)))
    whiten = (axes * variances.clamp_min(1e-12 * float(variances.max())).rsqrt()) @ axes.T
    columns = torch.where(known, matrix.double(), 0.0)[:, used] / scales[used]
    basis = orthonormal(whiten @ columns, _WEAKEST_COLUMN)
    search = Pursuit([basis], _FLOOR)
    search.add([torch.nn.functional.normalize(atoms.double() @ whiten, dim=1).to(atoms)])
    m, d = basis.shape[1], len(basis)
    while len(search.taken) < most:
        best, gain = search.best()
        if gain <= (m + _BY_CHANCE * math.sqrt(2 * m)) / max(1, d - len(search.taken)):
            break
        search.take(best)
    return search.taken
