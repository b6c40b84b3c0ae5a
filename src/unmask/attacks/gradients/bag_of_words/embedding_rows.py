"""The bag of words straight from the embedding's update: the rows that moved are the tokens that occurred.

A row of ∂L/∂E is the sum of the gradients of that token's occurrences; a token that does not occur has an exactly zero
row, also after clipping, pruning and rounding to few digits or levels, and in a weight delta of any optimiser without
decay, however small the step. Under decay every row moves by the same factor, W ← (1 − c)·W, so c is estimated as the
median over rows of ⟨ΔW, W⟩/⟨W, W⟩ and taken out first.

Exact zeros tell only if they are no accident. Entries that chance scattered over the rows (noise of which only the
largest entries were sent) leave about f₁²/2f₂ rows empty, f₁ and f₂ the numbers of rows with one and two entries. And a
few rows may be doubtful though most are not: where some hold a single entry, noise may have put it there just before
few digits were sent, and two or three by the same chance; and decay may have moved rows of which every entry shrinks
(in a gradient, has the sign of its weight). A row of weights that are zero, as that of padding, tells nothing.

Limits: an output layer that is tied to the embedding moves the rows of all tokens that the model thinks likely
(next-token training of tied models), and noise moves every row; then nothing is returned (by direction, `tied_rows.py`
may tell). The number of occurrences is not visible. A row of which nothing was sent is lost.
Source: Chao, Scandinavian Journal of Statistics 11 (1984), for the empty rows. Measured on the clients of Flower's
Hugging Face quick-start: 869 of 869 and 730 of 730 tokens, none false.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.gap import widest_gap
from unmask.models.adapter import Model

# Rows that moved must stand this far (in decades) above the roundings of those that did not.
_MIN_GAP_DECADES = 1.0
# Rows that never moved are reproduced by their decay to about one unit of rounding a step.
_ROUNDING_FLOOR = 1.0
# Of the empty rows: more than this share must be beyond what chance leaves; and of the others most have two entries.
_BEYOND_CHANCE = 0.5
# Rows of tokens hold more than this share of their entries, unless the update was pruned.
_DENSE = 0.5
# Rows of so many entries that chance leaves on average: fewer are none.
_BY_CHANCE = 1e-3
# Decay shrinks every weight that it moves, a gradient half of them.
_GROWING = 0.4


def tokens_from_rows(evidence: GradientEvidence, model: Model) -> Tensor | None:
    """Tokens whose embedding row moved; None if the update does not hold the embedding or moves every row."""
    return _moved_rows(evidence, model, model.token_embedding)


def find_doubtful_tokens(evidence: GradientEvidence, model: Model) -> frozenset[int]:
    """Those of the tokens whose row noise or an unknown decay may have moved as well."""
    update = evidence.gradients[model.token_embedding]
    if _decay_is_out(evidence, model.parameter(model.token_embedding).detach(), update):
        return frozenset()
    moved = (update != 0).any(1).nonzero()[:, 0]
    rows = update[moved]
    counts = (rows != 0).sum(1)
    is_doubtful = counts < _least_entries(counts, len(update))
    weights = model.parameter(model.token_embedding).detach()[moved.to(model.device)].to(rows)
    is_doubtful |= may_be_decay(evidence, rows, weights)
    return frozenset(moved[is_doubtful].tolist())


def may_be_decay(
    evidence: GradientEvidence, rows: Float[Tensor, "n d"], weights: Float[Tensor, "n d"]
) -> Bool[Tensor, " n"]:
    """Rows of which every entry that was sent is as decay would have it: of its weight's sign, or in a delta against.

    Few digits, pruning and chance may have left the rest of what decay makes.
    """
    if evidence.update is Update.DELTA and evidence.weight_decay == 0:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    along = rows * weights if evidence.update is Update.GRADIENT else -rows * weights
    return ((rows == 0) | (along > 0)).all(1)


def positions_from_rows(evidence: GradientEvidence, model: Model) -> Tensor | None:
    """Positions that were filled, where positions are learned and their embedding is shared."""
    name = model.position_embedding
    moved = None if name is None else _moved_rows(evidence, model, name)
    if moved is None:
        return None
    offset = model.layout.embedding.offset  # rows in front of that of position 0 belong to no token
    return moved[moved >= offset] - offset


def _moved_rows(evidence: GradientEvidence, model: Model, name: str) -> Tensor | None:
    update = evidence.gradients.get(name)
    if update is None or (name == model.token_embedding and evidence.may_be_tied(model)):
        return None
    weights = model.parameter(name).detach()
    if _decay_is_out(evidence, weights, update):
        moved = rows_beyond_decay(weights, update)
        telling = not bool(moved.all())
    else:
        moved = (update != 0).any(1)
        counts = moved.long()
        counts[moved] = (update[moved] != 0).sum(1)
        exists = (weights != 0).any(1).to(counts.device)  # nothing moves a row of zeros, as that of padding is
        telling = not _is_scattered(counts[exists | moved], update.shape[1])
    return moved.nonzero()[:, 0].to(model.device) if telling and bool(moved.any()) else None


def _decay_is_out(evidence: GradientEvidence, weights: Float[Tensor, "v d"], update: Float[Tensor, "v d"]) -> bool:
    """Whether rows are told after a common decay is taken out of them."""
    return evidence.update is Update.DELTA and evidence.weight_decay != 0 and _decays(weights, update)


def _least_entries(counts: Tensor, num_rows: int) -> int:
    """The fewest entries of a row that chance cannot have put there, if all rows with one entry are by chance."""
    rate = int((counts == 1).sum()) / num_rows
    least, expected = 1, rate * num_rows
    while expected > _BY_CHANCE:
        least += 1
        expected *= rate / least
    return least


def _decays(weights: Float[Tensor, "v d"], delta: Float[Tensor, "v d"]) -> bool:
    """Whether weights shrink that got no gradient: all rows move that are not zero, or those that move shrink."""
    moved = delta != 0
    still = ~moved.any(1) & (weights != 0).any(1)
    growing = ((delta * weights)[moved] > 0).double().mean()
    return not bool(still.any()) or float(growing) < _GROWING


def _is_scattered(counts: Tensor, width: int) -> bool:
    """Whether chance explains the empty rows, given the number of entries in each row.

    Entries that fall anywhere reach V·(1 − e^(−K/V)) of V rows, those of tokens only the rows of these tokens.
    """
    empty, ones, twos = (int((counts == number).sum()) for number in (0, 1, 2))
    total, num_rows, moved = int(counts.sum()), len(counts), len(counts) - empty
    by_scattering = num_rows * (1 - math.exp(-total / num_rows))
    if total < _DENSE * moved * width and moved > _BEYOND_CHANCE * by_scattering:
        return True
    by_chance = ones**2 / (2 * twos + 1)
    return by_chance >= _BEYOND_CHANCE * empty or ones > _BEYOND_CHANCE * (len(counts) - empty)


def rows_beyond_decay(weights: Float[Tensor, "v d"], delta: Float[Tensor, "v d"]) -> Bool[Tensor, " v"]:
    """Rows of a weight delta that are more than their common decay: ΔW_v ≠ −c·W_v.

    The rest of each row is measured in roundings of the weights; rows that moved stand above a gap. None did, if there
    is no gap of a decade.
    """
    before, change = weights.double(), delta.double()
    coefficients = (change * before).sum(1) / before.square().sum(1).clamp_min(1e-300)
    rest = change - coefficients.median() * before
    roundings = rest.norm(dim=1) / (torch.finfo(delta.dtype).eps * before.norm(dim=1)).clamp_min(1e-300)
    gap = widest_gap(roundings, ceiling=float(roundings.max()), floor=_ROUNDING_FLOOR)
    if gap.decades < _MIN_GAP_DECADES:
        return torch.zeros_like(roundings, dtype=torch.bool)
    return roundings > gap.threshold
