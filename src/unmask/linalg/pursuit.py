"""Which atoms a noise-free matrix is made of, where it has fewer columns than atoms: Y = AᵀC, few rows of A in use.

    U    ← an orthonormal basis of Y; Q ← nothing
    R    ← what Q leaves of U;  U_R ← orth(R)
    take   the atom a with the largest |U_Rᵀa|² / |a outside of Q|²;  Q ← [Q, a]
    until  nothing is left of U but rounding

Every column of U is a combination of the atoms in use, so that a search among few columns finds many atoms. A wrong
atom that was taken does no harm while fewer atoms than dimensions are taken: least squares then gives it no weight.
Several matrices may be explained at once by the same atoms, seen at several layers: gains are averaged over them.

Notation: d dimensions, m columns, k atoms taken; need_a what is left of U, in norm, if atom a alone is given back.
Limits: atoms in general position and k < d; about 0.6·d atoms are found. Near atoms must be told apart by the caller
(`find_rivals`). Cost: one pass over all atoms, n·(d + m²) multiplications, for each atom that is taken.
Source: rank-aware orthogonal least squares, Davies, Eldar, arXiv 1004.4529; Chen, Billings, Luo 1989.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.shapes import Basis

_LEAST_OUTSIDE = 1e-4  # of an atom's squared norm: less is rounding, and the atom is taken as good as known
_FRESH = 64  # atoms taken between two computations of all products anew: updates of them lose digits
_AT_ONCE = 2**13  # atoms: a temporary of (2**13, atoms taken)


class _Rows:
    """Rows that more are added to: a tensor with room at its end."""

    def __init__(self, first: Tensor) -> None:
        self._room, self._length = first.clone(), len(first)

    def add(self, rows: Tensor) -> None:
        end = self._length + len(rows)
        if end > len(self._room):
            room = self._room.new_empty(max(end, 2 * len(self._room)), *self._room.shape[1:])
            room[: self._length] = self.all
            self._room = room
        self._room[self._length : end] = rows
        self._length = end

    @property
    def all(self) -> Tensor:
        return self._room[: self._length]


class _Matrix:
    """What is left of one matrix' basis, what was taken, and all atoms with their products."""

    def __init__(self, basis: Basis) -> None:
        self.rest = basis.double()
        self.taken = self.rest.new_zeros(len(basis), 0)
        self.atoms: _Rows | None = None

    def add(self, rows: Float[Tensor, "n d"]) -> None:
        products = rows @ self.rest.to(rows)
        outside = rows.square().sum(1) - (rows @ self.taken.to(rows)).square().sum(1)
        if self.atoms is None:
            self.atoms, self.products, self.outside = _Rows(rows), _Rows(products), _Rows(outside)
        else:
            self.atoms.add(rows)
            self.products.add(products)
            self.outside.add(outside)

    def take(self, index: int, is_fresh: bool) -> None:
        assert self.atoms is not None
        atoms = self.atoms.all
        direction = atoms[index].double()
        for _ in range(2):  # twice is enough (Kahan)
            direction = direction - self.taken @ (self.taken.T @ direction)
        direction = direction / direction.norm().clamp_min(1e-300)
        explained = direction @ self.rest
        self.taken = torch.cat([self.taken, direction[:, None]], dim=1)
        self.rest = self.rest - direction[:, None] * explained
        along = atoms @ direction.to(atoms)
        self.outside.all.sub_(along.square())
        if is_fresh:
            self.products.all.copy_(atoms @ self.rest.to(atoms))
        else:
            self.products.all.sub_(along[:, None] * explained.to(atoms))

    def shares(self, floor: float) -> Float[Tensor, " n"] | None:
        """The share of each atom's part outside of those taken that lies in what is left; None if nothing is."""
        _, sizes, columns = torch.linalg.svd(self.rest, full_matrices=False)
        open_ones = columns[sizes > floor] / sizes[sizes > floor, None]
        if not len(open_ones):
            return None
        products, outside = self.products.all, self.outside.all
        inside = (products @ open_ones.T.to(products)).square().sum(1)
        shares = (inside / outside.clamp_min(_LEAST_OUTSIDE)).clamp_max(1.0)
        return shares.masked_fill(outside < _LEAST_OUTSIDE, 0.0)


class Pursuit:
    """Atoms taken so far, of a dictionary that may grow. Atoms have norm 1 and come with one row for each matrix."""

    def __init__(self, bases: Sequence[Basis], floor: float) -> None:
        self.floor = floor
        self._matrices = [_Matrix(basis) for basis in bases]
        self.taken: list[int] = []
        self.num_atoms = 0

    @property
    def residual(self) -> float:
        """What is left of the worst matrix: the root mean square over its basis' columns."""
        return max(float(one.rest.norm()) / max(1, one.rest.shape[1]) ** 0.5 for one in self._matrices)

    def add(self, atoms: Sequence[Float[Tensor, "n d"]]) -> None:
        """More atoms, as they look at each matrix."""
        for one, rows in zip(self._matrices, atoms, strict=True):
            one.add(rows)
        self.num_atoms += len(atoms[0])

    def best(self) -> tuple[int, float]:
        """The atom of the largest gain: the share of its part outside of those taken that lies in what is left.

        Averaged over matrices of which something is left.
        """
        parts = [shares for one in self._matrices if (shares := one.shares(self.floor)) is not None]
        if not parts or not self.num_atoms:
            return 0, 0.0
        gains = torch.stack(parts).mean(0)
        gains[self.taken] = 0.0
        gain, index = gains.max(0)
        return int(index), float(gain)

    def take(self, index: int) -> None:
        """Explain what one more atom can explain."""
        self.taken.append(index)
        for one in self._matrices:
            one.take(index, is_fresh=len(self.taken) % _FRESH == 0)

    def rows(self) -> list[Float[Tensor, "k d"]]:
        """The atoms taken, at each matrix."""
        return [
            one.rest.new_zeros(0, len(one.rest)) if one.atoms is None else one.atoms.all[self.taken]
            for one in self._matrices
        ]


@dataclass(frozen=True)
class Support:
    """Atoms that explain a matrix together: how much each is needed, and the direction that is its own.

    `residual` is what they leave of the matrix: the root mean square over its basis' columns.
    """

    chosen: tuple[int, ...]
    needs: Float[Tensor, " k"]
    own: Float[Tensor, "k d"]
    basis: Basis
    residual: float


def find_support(atoms: Float[Tensor, "n d"], basis: Basis, floor: float, most: int, least_need: float) -> Support:
    """At most `most` atoms that explain a matrix down to `floor`, each of which is needed."""
    search = Pursuit([basis], floor)
    search.add([atoms])
    while len(search.taken) < most:
        best, gain = search.best()
        if gain <= 0:
            break
        search.take(best)
    found = support_of(atoms, search.taken, basis)
    while not bool((found.needs > least_need).all()):
        kept = [atom for atom, need in zip(found.chosen, found.needs.tolist(), strict=True) if need > least_need]
        found = support_of(atoms, kept, basis)
    return found


def support_of(atoms: Float[Tensor, "n d"], chosen: Sequence[int], basis: Basis) -> Support:
    """How much each of some atoms is needed: ‖qᵀU‖, q the unit vector of its part outside of all the others."""
    frame, factor = torch.linalg.qr(atoms[list(chosen)].double().T)
    rows = torch.linalg.solve_triangular(factor, frame.T, upper=True)
    own = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    rest = basis - frame @ (frame.T @ basis)
    residual = float(rest.norm()) / max(1, basis.shape[1]) ** 0.5
    return Support(tuple(chosen), (own @ basis).norm(dim=1).nan_to_num(0.0), own, frame, residual)


def find_rivals(atoms: Float[Tensor, "n d"], found: Support) -> Float[Tensor, " k"]:
    """What is left of the matrix, in norm, if the best other atom stands in the place of a chosen one.

    It is need·|u'|/|u' + q·qᵀu|, u' the part of the other atom u outside of all that are chosen.
    """
    is_chosen = torch.zeros(len(atoms), dtype=torch.bool, device=atoms.device)
    is_chosen[list(found.chosen)] = True
    least = torch.ones_like(found.needs)
    for rows, chosen in zip(atoms.split(_AT_ONCE), is_chosen.split(_AT_ONCE), strict=True):
        others = rows[~chosen].double()
        along = (others @ found.own.T).square()
        outside = (others - (others @ found.basis) @ found.basis.T).square().sum(1)[:, None]
        least = torch.minimum(least, (outside / (outside + along).clamp_min(1e-300)).amin(0))
    return found.needs * least.sqrt()


def orthonormal(matrix: Float[Tensor, "d m"], floor: float) -> Basis:
    """An orthonormal basis of the columns; singular values below `floor` times the largest are rounding."""
    left, sizes, _ = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left[:, sizes > floor * sizes.max()] if len(sizes) else left


def inverse_root(moments: Float[Tensor, "d d"], without: Basis, ridge: float) -> Float[Tensor, "d d"]:
    """What whitens rows of these second moments, outside of some directions; `ridge` is a share of the largest."""
    free = torch.eye(len(moments), dtype=moments.dtype, device=moments.device) - without @ without.T
    variances, axes = torch.linalg.eigh(free @ moments @ free)
    return free @ (axes * (variances.clamp_min(0) + ridge * variances.max()).rsqrt()) @ axes.T
