"""Weight decay inside a gradient (an L2 penalty in the loss): told by rows that no token moved, and taken out.

    row v of the embedding  =  g_v + c·W_v,   with g_v = 0 for every token, or position, that does not occur

So rows that are the model's own rows times one number, to the last digits, show c; and c·W is in every other matrix as
well. Rows that moved must stand a decade above what is left of the others: noise of the size of roundings leaves the
same in all rows, and in short ones that is more than their own rounding. What is left is the gradient of the loss, as
exact as before where c·W is no larger than it.

Notation: W the weights; c the decay, any number but zero.
Limits: a row that is zero, of weights that are not, contradicts a decay. Biases and gains are decayed by some libraries
and not by others, so that vectors are left out. Updates with few digits or noise show no such rows and are left as they
are, as are updates without an embedding that tells. That only the embedding decays is not seen; then texts are not
found, because no replay confirms them.
Cost: one pass over the update. Source: ours.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model

_ROUNDINGS = 8.0  # that a row may be off: a product and a sum leave one, a penalty's own gradient two or three
_GAP = 10.0  # rows that moved have so much more left than those that did not
_FEWEST_ENTRIES = 8  # of a row: so many do not agree on a factor to seven digits by chance


@torch.no_grad()
def without_decay(evidence: GradientEvidence, model: Model) -> tuple[GradientEvidence, str]:
    """The gradient without the decay that its embeddings prove, and a sentence; else as it is, and nothing."""
    if evidence.update is not Update.GRADIENT:
        return evidence, ""
    weights = {n: p.detach() for n, p in model.named_parameters() if p.ndim > 1 and n in evidence.gradients}
    tables = [n for n in (model.token_embedding, model.position_embedding) if n in weights]
    found = (find_decay(evidence.gradients[name], weights[name]) for name in tables)
    decay = next((factor for factor in found if factor is not None), None)
    if decay is None or not all(_stands_apart(evidence.gradients[name], weights[name], decay) for name in tables):
        return evidence, ""
    rest = {name: _subtract(evidence.gradients[name], weights[name], decay) for name in weights}
    why = f"the gradient holds weight decay ({decay:.2g} of each weight), which was taken out"
    return replace(evidence, gradients=rest), why


def find_decay(update: Float[Tensor, "v d"], weights: Float[Tensor, "v d"]) -> float | None:
    """The number by which rows of an embedding are in its update; None if no rows are, or some are not there at all."""
    exists = (weights != 0).sum(1) >= _FEWEST_ENTRIES
    rows, own = update[exists].double(), weights[exists].to(update).double()
    if not len(rows) or not bool(rows.any(1).all()):
        return None
    own = own.masked_fill(rows == 0, 0.0)  # entries that were not sent
    factors = (rows * own).sum(1) / own.square().sum(1)
    unmoved = _is_multiple(rows, own, factors[:, None], update.dtype)
    unmoved &= (own != 0).sum(1) >= _FEWEST_ENTRIES
    if not bool(unmoved.any()):
        return None
    decay = factors[unmoved].median()
    agree = bool(((factors[unmoved] - decay).abs() <= _ROUNDINGS * torch.finfo(update.dtype).eps * decay.abs()).all())
    return float(decay) if agree else None


def _stands_apart(update: Float[Tensor, "v d"], weights: Float[Tensor, "v d"], decay: float) -> bool:
    """Whether no row has a rest beyond its own rounding that is like the rest of rows that did not move."""
    rows = update.double()
    own = weights.to(update).double().masked_fill(rows == 0, 0.0)
    unmoved = _is_multiple(rows, own, decay, update.dtype)
    rest, still = (rows - decay * own).norm(dim=1), unmoved & (own != 0).any(1)
    return not bool(still.any()) or bool((rest[~unmoved] > _GAP * rest[still].median()).all())


def _subtract(update: Tensor, weights: Tensor, decay: float) -> Tensor:
    """A matrix without its decay, where entries were sent; rows that are nothing else are zero."""
    rows = update.double()
    own = weights.to(update).double().masked_fill(rows == 0, 0.0)
    unmoved = _is_multiple(rows, own, decay, update.dtype)
    return (rows - decay * own).masked_fill(unmoved[..., None], 0.0).to(update)


def _is_multiple(rows: Tensor, own: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Bool[Tensor, " v"]:
    decayed = factor * own
    return (rows - decayed).norm(dim=-1) <= _ROUNDINGS * torch.finfo(dtype).eps * decayed.norm(dim=-1)
