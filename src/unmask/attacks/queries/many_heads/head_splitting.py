"""Which sign W has, where sequences of two tokens cannot tell: the first token is asked twice."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.head_values import all_off, gradient
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs

_NOTHING = 1e-2  # of v⁺ − v⁻: a part below this is none; gradients at a score are read to 10⁻¹¹, in float32 to 10⁻³
_SCORE = -0.5  # where the shares of (W, v) and (−W, −v) with two copies differ most, nearly


def split_signs(
    pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k d"], Float[Tensor, " d"]]:
    """v of the heads W_k, of the heads −W_k, and of a head with W = 0.

        v⁺·σ(t) + v⁻·σ(−t) = v⁻ + (v⁺ − v⁻)·σ(t)

    is one head and a linear term for two tokens. With two copies of the first, scores grow by log 2:

        v⁺·σ(t + log 2) + v⁻·(σ(−t + log 2) − 1) = J·σ(t + log 2) + v⁻·(σ(t + log 2) − σ(t − log 2))

    Notation: J = v⁺ − v⁻, what two tokens show of a unit; e = Σ_k v⁻_k + v⁰/2 their linear term; v⁰ that of W = 0,
    whose share is 1/2 with one copy and 2/3 with two.
    Limits: units of one head only.
    Cost: (units + 1)·width queries.
    """
    bare = replace(pairs, linear=None)
    once, twice = (all_off(bare, y, isolation, copies) for copies in (1, 2))
    still = 6 * (twice - once)
    total = isolation.units.total
    minus = torch.zeros_like(total)
    up, down = (1 / (1 + math.exp(-_SCORE - shift)) for shift in (math.log(2), -math.log(2)))
    for k in range(len(isolation.w)):
        seen = gradient(replace(pairs, linear=twice), y, isolation, k, _SCORE, copies=2)
        minus[k] = (seen - total[k] * up) / (up - down)
    size = total.norm(dim=1)
    is_plain = minus.norm(dim=1) < _NOTHING * size
    is_turned = (minus + total).norm(dim=1) < _NOTHING * size
    minus = torch.where(is_turned[:, None], -total, torch.where(is_plain[:, None], 0.0, minus))
    is_pair = ~is_plain & ~is_turned
    if int(is_pair.sum()) == 1:  # what is left of the linear term has more digits than a gradient at a score
        minus[is_pair] = once - still / 2 - minus[~is_pair].sum(0)
    return total + minus, minus, still
