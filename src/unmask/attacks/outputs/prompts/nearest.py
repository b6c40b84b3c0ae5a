"""A text by directions alone: position by position, the token whose state points where the one seen points.

    v_i = argmax_v cos(s(v | v_0 … v_{i−1}), s_i)

Nothing is assumed of noise, of digits or of units: one factor of all states leaves their directions. So it reads on
where a proof had to stop, and it proves nothing. Two things follow from it:

    the factor    median over positions of ⟨s_i, s(v_i)⟩/‖s(v_i)‖², of states that agree but for their lengths
    what is there   e_i = −(m − 1)/2·ln(1 − c_i²) − ln V,    c_i the largest cosine of all tokens at i

A direction of noise is as near to one token as c with probability (1 − c²)^((m−1)/2), so the nearest of V tokens has an
e of about 0.6 ± 1.3 (Gumbel). If the mean over positions is not beyond that, nothing stands out of the noise: every
token was looked at, by its expected state (templates.py) and, of the likeliest or of all, by its own.

Notation: s_i the state seen at position i, as it is compared; m its entries, V the vocabulary.
Limits: where all states share a direction, cosines are close to each other and noise decides.
Cost: `_SHORTLIST` candidates a position; the vocabulary, where that costs less than `_MOST_FLOPS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.seen_text import NearestText, SeenText
from unmask.attacks.outputs.prompts.side_by_side import Reading, RowPass

_SHORTLIST = 256
_MOST_FLOPS = 1e10  # a position: half a second on one core
_GUMBEL_MEAN, _GUMBEL_DEVIATION = 0.58, 1.28
_BEYOND = 2.0  # deviations of the mean over positions: of texts of noise, one in forty seems to hold something
_SHORTEST = 1e-30


@dataclass(frozen=True)
class ExpectedStates:
    """The state that is expected of each token (templates.py)."""

    means: Float[Tensor, "vocab m"]

    @cached_property
    def squares(self) -> Float[Tensor, "vocab m"]:
        """Squares of all entries."""
        return self.means.square()

    def cosines(self, row: Float[Tensor, " m"], weights: Float[Tensor, " m"] | None = None) -> Float[Tensor, " vocab"]:
        """Cosines of a row with each of them, entries multiplied with weights."""
        weights = torch.ones_like(row) if weights is None else weights
        lengths = (self.squares @ weights.square()).sqrt() * (row * weights).norm()
        return self.means @ (row * weights.square()) / lengths.clamp_min(_SHORTEST)


def read_nearest(
    seen: SeenText, text: Continuation, first: ExpectedStates, later: ExpectedStates, done: int
) -> Reading[NearestText]:
    """Read rows from `done` on, behind a text that is known up to there."""
    tokens: list[int] = []
    cosines, largest, factors, num_tested = list[float](), list[float](), list[float](), 0
    vocabulary = torch.arange(len(later.means), device=seen.states.device)
    is_cheap = len(vocabulary) * (24.0 * len(text.prefixes) + 4.0) * text.model.width**2 <= _MOST_FLOPS
    for index in range(done, len(seen)):
        expected = (later if text.num_known else first).cosines(seen.aligned[index], seen.weights[index])
        chosen = vocabulary if is_cheap else expected.topk(min(_SHORTLIST, len(expected))).indices
        trial = yield RowPass(text, chosen)
        rows = (trial.states * seen.weights[index]).double()
        row = seen.states[index].double()
        cosine = rows @ row / (rows.norm(dim=1) * row.norm()).clamp_min(_SHORTEST)
        best = int(cosine.argmax())
        tokens.append(int(chosen[best]))
        cosines.append(float(cosine[best]))
        largest.append(max(float(cosine[best]), float(expected.max())))
        if math.sqrt(max(0.0, 1 - float(cosine[best]) ** 2)) <= float(seen.noise.tolerances[index]):
            factors.append(float(rows[best] @ row / rows[best].square().sum().clamp_min(_SHORTEST)))
        num_tested += len(chosen)
        text = text.accept(trial, best)
    stands_out = is_beyond_chance(largest, seen.states.shape[1], len(vocabulary))
    return NearestText(tuple(tokens), tuple(cosines), tuple(factors), stands_out, num_tested)


def is_beyond_chance(cosines: list[float], width: int, num_tokens: int) -> bool:
    """Whether the nearest tokens are nearer than those of noise would be."""
    if not cosines:
        return True
    squares = [min(cosine**2, 1 - 1e-12) if cosine > 0 else 0.0 for cosine in cosines]
    excess = [-(width - 1) / 2 * math.log1p(-square) - math.log(num_tokens) for square in squares]
    mean, error = sum(excess) / len(excess), _GUMBEL_DEVIATION / math.sqrt(len(excess))
    return mean > _GUMBEL_MEAN + _BEYOND * error
