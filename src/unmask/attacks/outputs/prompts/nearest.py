"""A text by directions alone: position by position, the token whose state points where the one seen points.

    v_i = argmax_v cos(s(v | v_0 … v_{i−1}), s_i)

Nothing is assumed of noise, of digits or of units: one factor of all states leaves their directions. So it reads on
where a proof had to stop, and it proves nothing. Two things follow from it:

    the factor    median over positions of ⟨s_i, s(v_i)⟩/‖s(v_i)‖², of states that agree but for their lengths
    what is there   e_i = −(m − 1)/2·ln(1 − c_i²) − ln V,    c_i the largest cosine of all tokens at i

A direction of noise is as near to one token as c with probability (1 − c²)^((m−1)/2), so the nearest of V tokens has an
e of about 0.6 ± 1.3 (Gumbel). If neither the mean over positions nor one of them is beyond that, nothing stands out of
the noise: every token was looked at, by its expected state (templates.py) and, of the likeliest or of all, by its own.
Behind a wrong token that says nothing, since all later states depend on it. So noise must show in every row by itself:
noise that hides tokens makes rows longer than states are. Rows that were scaled down afterwards are not believed.

Where entries were left out, the others alone are compared as well, and the e that is larger counts: of entries that are
sent as they are, few tell a token. A row that few entries make up is not noise, whatever the cosines.

Notation: s_i the state seen at position i, as it is compared; m its entries, or those that were sent, V the vocabulary.
Limits: where all states share a direction, cosines are close to each other and noise decides.
Cost: `_SHORTLIST` candidates a position; the vocabulary, where that costs less than `_MOST_FLOPS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_FAR_BEYOND = 5.0  # the same of the farthest position: one in 150
_SPIKES = 30.0  # mean fourth power by the square of the mean square: 3 of Gaussian noise, 6 of Laplace's
_LOUDER = 2.0  # squared lengths by those of states: noise that hides one of 500 tokens in 64 entries makes it 4
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

    def is_louder(self, row: Float[Tensor, " m"], weights: Float[Tensor, " m"] | None = None) -> bool:
        """Whether a row is longer than states are, so that noise may hide them."""
        weights = torch.ones_like(row) if weights is None else weights
        return bool((row * weights).square().sum() > _LOUDER * (self.squares @ weights.square()).median())


def read_nearest(
    seen: SeenText, text: Continuation, first: ExpectedStates, later: ExpectedStates, done: int
) -> Reading[NearestText]:
    """Read rows from `done` on, behind a text that is known up to there."""
    tokens: list[int] = []
    cosines, excess, factors, num_tested = list[float](), list[float | None](), list[float](), 0
    is_loud = done == 0  # whether all rows are
    vocabulary = torch.arange(len(later.means), device=seen.states.device)
    is_cheap = len(vocabulary) * (24.0 * len(text.prefixes) + 4.0) * text.model.width**2 <= _MOST_FLOPS
    for index in range(done, len(seen)):
        table = later if text.num_known else first
        expected = table.cosines(seen.aligned[index], seen.weights[index])
        is_loud &= table.is_louder(seen.aligned[index], seen.weights[index])
        chosen = vocabulary if is_cheap else expected.topk(min(_SHORTLIST, len(expected))).indices
        trial = yield RowPass(text, chosen)
        rows, row = (trial.states * seen.weights[index]).double(), seen.states[index].double()
        best, cosine, beyond = nearest_row(rows, row, len(vocabulary), float(expected.max()))
        tokens.append(int(chosen[best]))
        cosines.append(cosine)
        excess.append(beyond)
        if math.sqrt(max(0.0, 1 - cosine**2)) <= float(seen.noise.tolerances[index]):
            factors.append(float(rows[best] @ row / rows[best].square().sum().clamp_min(_SHORTEST)))
        num_tested += len(chosen)
        text = text.accept(trial, best)
    is_empty = not bool(seen.states.any())  # no entry of any row was sent
    is_drowned = is_empty or (is_loud and not is_beyond_chance(excess))
    return NearestText(tuple(tokens), tuple(cosines), tuple(factors), is_drowned, num_tested)


def nearest_row(
    rows: Float[Tensor, "k m"], row: Float[Tensor, " m"], num_tokens: int, expected: float = 0.0
) -> tuple[int, float, float | None]:
    """The nearest of some rows, its cosine, and e of the larger of it and what is `expected`; None if nothing is seen.

    Where entries are missing, those that were sent decide if they tell more.
    """
    sent = row != 0
    if not bool(sent.any()):
        return 0, 0.0, None
    cosines = _cosines(rows, row)
    best = int(cosines.argmax())
    excess = _excess(max(float(cosines[best]), expected), len(row), num_tokens)
    of_sent = cosines if bool(sent.all()) else _cosines(rows * sent, row)
    if (more := _excess(float(of_sent.max()), int(sent.sum()), num_tokens)) > excess:
        best, excess = int(of_sent.argmax()), more
    is_spiky = float(row.pow(4).mean()) > _SPIKES * float(row.square().mean()) ** 2
    return best, float(cosines[best]), math.inf if is_spiky else excess


def _cosines(rows: Float[Tensor, "k m"], row: Float[Tensor, " m"]) -> Float[Tensor, " k"]:
    return rows @ row / (rows.norm(dim=1) * row.norm()).clamp_min(_SHORTEST)


def _excess(cosine: float, width: int, num_tokens: int) -> float:
    square = min(cosine**2, 1 - 1e-12) if cosine > 0 else 0.0
    return -(width - 1) / 2 * math.log1p(-square) - math.log(num_tokens)


def is_beyond_chance(excess: Sequence[float | None]) -> bool:
    """Whether the nearest tokens of a text's positions are nearer than those of noise would be."""
    known = [each for each in excess if each is not None]
    if not known:
        return False
    mean, error = sum(known) / len(known), _GUMBEL_DEVIATION / math.sqrt(len(known))
    return mean > _GUMBEL_MEAN + _BEYOND * error or max(known) > math.log(len(known)) + _FAR_BEYOND
