"""Heads that never part, since their W are positive multiples of one another: repeated tokens tell them apart."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.many_heads.head_values import still_moves
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.rational import fit_sigmoids

_MOST_MEMBERS = 3
# Copies of the first token and of the second: ratios from 1/16 to 16.
_FEW = ((1, 16), (1, 12), (1, 8), (1, 6), (1, 4), (1, 3), (1, 2), (2, 3))
_COUNTS = (*_FEW, (1, 1), *[(k, n) for n, k in reversed(_FEW)])
_MOVE = 0.4  # of a score: the unit must stay on one side of zero, so that its heads keep their order
_CENTRE = -2.0


def find_suspects(pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation) -> list[int]:
    """Units that do not answer as one head does: a score that moves by 2.5 along the dual must be read so.

    Cost: two queries a unit.
    """
    units = torch.arange(len(isolation.w), device=y.device)
    at_base, moved = (
        isolation.units.scores(pairs(U, y), U, units) for U in (isolation.bases, isolation.bases + 2.5 * isolation.dual)
    )
    is_one_head = (moved - at_base - 2.5).abs() < 1e4 * isolation.resolution.prediction
    return units[~is_one_head].tolist()


def open_cluster(
    pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation, unit: int, is_open: bool
) -> tuple[Units, Float[Tensor, "k d"]]:
    """The same units with one opened into its heads, and the directions w with that of its first head.

        F(ρ) = Σ_i (v_iᵀu)·ρ/(ρ + e^{−t_i}),    t_i = λ_i·uᵀw

    for k copies of one token and l of the other, ρ = k/l: the rational fit gives v_iᵀu and t_i at every probe, and
    from these v_i, w and the multiples λ_i follow by least squares. Where it `is_open` already, w is known well enough
    for long probes that hardly change a score, which gains the digits that short ones lose.

    Limits: two or three heads, λ > 0. Raises `NoPlane` where they do not explain the answers.
    Cost: 17 queries for each of width + 1 probes.
    Source: the partial fractions are those of Kim, Kim, Guo, arXiv 2608.03294; isolating the cluster first is ours.
    """
    w, dual = isolation.w[unit], isolation.dual[unit]
    centre = isolation.bases[unit] + (_CENTRE - isolation.bases[unit] @ w) * dual
    if is_open:
        moves = torch.cat([still_moves(isolation, centre, {unit: 0.0}), _MOVE * dual[None]])
    else:
        Q = isolation.probes[unit]
        moves = Q * (_MOVE / (Q @ w).abs().clamp_min(w.norm() * Q.norm(dim=1) / len(w) ** 0.5))[:, None]
    U = torch.cat([centre[None], centre + moves])
    values = torch.stack([pairs(U, y, copies, repeats) for copies, repeats in _COUNTS], dim=1)
    rho = torch.tensor([copies / repeats for copies, repeats in _COUNTS], dtype=torch.float64, device=y.device)
    fit = fit_sigmoids(rho, values, _MOST_MEMBERS, 3 * isolation.resolution.precision * values.abs().max(1).values)
    if not bool(fit.explained.all()) or fit.t.shape[1] < 2 or not bool((fit.t < 0).all()):
        raise NoPlane("heads that turn on together are not multiples of one another, or more than three")
    slopes = (fit.t / fit.t[:, :1]).median(0).values
    v = torch.linalg.lstsq(U, fit.c, driver="gels").solution.T
    new_w = isolation.w.clone()
    new_w[unit] = torch.linalg.lstsq(U, fit.t[:, :1], driver="gels").solution[:, 0]
    return isolation.units.with_members(unit, v, slopes), new_w
