"""Gradients of the answers with respect to u where all scores stay as they are: v of heads, to the last digit."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs

_FURTHER = 20.0  # scores by which probes turn a unit further on or off
_ASIDE = 0.3  # of |u|: probes that change no score
_OFF = 1.1  # of the saturation


def totals(pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation) -> Float[Tensor, "k d *p"]:
    """Σ_i v_ki of every unit: F(u, y) = (Σ_i v_ki)ᵀu where unit k is on and all others are off.

    Cost: width + 1 queries a unit.
    """
    saturation = isolation.resolution.saturation
    return torch.stack([gradient(pairs, y, isolation, k, saturation) for k in range(len(isolation.w))])


def all_off(pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation, copies: int = 1) -> Float[Tensor, "d *p"]:
    """What is linear in u besides the heads that turn on and off, read where all of them are off.

    Cost: width + 1 queries.
    """
    point = -_OFF * isolation.resolution.saturation * isolation.dual.sum(0)
    return _solve(pairs, y, point, still_moves(isolation, point, {}), copies)


def gradient(
    pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation, unit: int, score: float, copies: int = 1
) -> Float[Tensor, "d *p"]:
    """g with F(u, y) = gᵀu for all u at which one unit has this score and all others are off.

    Notation: `copies` k of the first token move every score by log k, so that g = Σ_i v_i·σ(λ_i·score + log k).
    Cost: width queries, or one more where the score is beyond saturation.
    """
    base = isolation.bases[unit]
    point = base + (score - base @ isolation.w[unit]) * isolation.dual[unit]
    is_far = abs(score) >= 0.9 * isolation.resolution.saturation
    return _solve(pairs, y, point, still_moves(isolation, point, {unit: score if is_far else 0.0}), copies)


def still_moves(isolation: Isolation, point: Float[Tensor, " d"], scores: dict[int, float]) -> Float[Tensor, "m d"]:
    """Independent directions, none of which brings a score into range or changes one that is; `scores` of those on."""
    num_units = len(isolation.w)
    free = torch.linalg.qr(isolation.w.T, mode="complete").Q[:, num_units:].T
    further = [
        scores.get(k, -1.0) / abs(scores.get(k, -1.0)) * _FURTHER * isolation.dual[k]
        for k in range(num_units)
        if scores.get(k, -1.0) != 0
    ]
    return torch.cat([_ASIDE * point.norm() * free, *[move[None] for move in further]])


def _solve(
    pairs: Pairs, y: Float[Tensor, " d"], point: Float[Tensor, " d"], moves: Float[Tensor, "m d"], copies: int
) -> Float[Tensor, "d *p"]:
    """The gradient from differences along the moves; from the answer itself, where a direction is left."""
    answers = pairs(torch.cat([point + moves, point[None]]), y, copies)
    changes = answers[:-1] - answers[-1]
    if len(moves) < len(point):
        moves, changes = torch.cat([moves, point[None]]), torch.cat([changes, answers[-1:]])
    return torch.linalg.solve(moves, changes.reshape(len(moves), -1)).reshape(changes.shape)
