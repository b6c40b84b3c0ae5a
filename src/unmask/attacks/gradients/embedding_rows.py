"""The bag of words straight from the embedding's update: the rows that moved are the tokens that occurred.

A row of ∂L/∂E is the sum of the gradients of that token's occurrences; a token that does not occur has an exactly zero
row. An optimiser moves weights, not gradients: under AdamW every row also decays by the same factor, W ← (1 − c)·W, so
c is estimated as the median over rows of ⟨ΔW, W⟩/⟨W, W⟩ and taken out first.

Limits: an output layer that is tied to the embedding moves every row (next-token training of tied models), and so
does noise; then nothing is returned. The number of occurrences is not visible. A row of a weight delta that moved by
less than the rounding of the weights is lost.
Source: measured on the clients of Flower's Hugging Face quick-start: 869 of 869 and 730 of 730 tokens, none false.
"""

from __future__ import annotations

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
# A token's row gets a gradient in nearly all of its entries; rows with few are not rows of tokens.
_DENSE = 0.5


def tokens_from_rows(evidence: GradientEvidence, model: Model) -> Tensor | None:
    """Tokens whose embedding row moved; None if the update does not hold the embedding or moves every row."""
    return _moved_rows(evidence, model, model.token_embedding)


def positions_from_rows(evidence: GradientEvidence, model: Model) -> Tensor | None:
    """Positions that were filled, where positions are learned and their embedding is shared."""
    name = model.position_embedding
    return None if name is None else _moved_rows(evidence, model, name)


def _moved_rows(evidence: GradientEvidence, model: Model, name: str) -> Tensor | None:
    update = evidence.gradients.get(name)
    if update is None:
        return None
    if evidence.update is Update.GRADIENT:
        moved = (update.amax(1) != 0) | (update.amin(1) != 0)
    else:
        moved = rows_beyond_decay(model.parameter(name).detach(), update)
    if bool(moved.all()) or not bool(moved.any()) or float((update[moved] != 0).double().mean(1).min()) < _DENSE:
        return None
    return moved.nonzero()[:, 0].to(model.device)


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
