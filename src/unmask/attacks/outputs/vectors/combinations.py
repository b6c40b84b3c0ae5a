"""Edits that together explain a residual: their measured effects add up to it.

A beam over sets of edits of different slots: begin with the best pairs, extend by any edit, keep the sets that leave
least. Effects of edits made together add up nearly, so most sets that leave little are worth a test.

Notation: D the measured effects of a text's best edits, r its residual: ‖r − Σ D‖² from the Gram matrix alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.candidate_edits import Edits
from unmask.attacks.outputs.vectors.edits import EMPTY


@dataclass(frozen=True)
class CombinationSettings:
    """Edits that are combined, sets kept at each size, and the largest size."""

    edits: int = 200
    pairs: int = 48
    sets: int = 16
    largest: int = 5


@dataclass(frozen=True)
class EditSets:
    """For each text a row of sets of edits; slots are EMPTY where a set has fewer."""

    slots: Int[Tensor, "c s m"]
    values: Int[Tensor, "c s m"]
    valid: Bool[Tensor, "c s"]


def combine_edits(
    edits: Edits,
    effects: Float[Tensor, "c k d"],
    residuals: Float[Tensor, "c d"],
    settings: CombinationSettings,
) -> EditSets:
    """Sets of the edits of each text that leave least of its residual."""
    left = (residuals[:, None] - effects).square().sum(2).masked_fill(~edits.valid, torch.inf)
    best = left.topk(min(settings.edits, left.shape[1]), dim=1, largest=False)
    two = best.indices[..., None].expand(-1, -1, 2)
    slots, values, valid = edits.slots.gather(1, two), edits.values.gather(1, two), best.values.isfinite()
    D = effects.gather(1, best.indices[..., None].expand(-1, -1, effects.shape[2]))
    gram, along = D @ D.mT, (D @ residuals[..., None])[..., 0]
    same = (slots[:, :, None, :, None] == slots[:, None, :, None, :]) & (slots >= 0)[:, :, None, :, None]
    clash = same.any(-1).any(-1) | ~valid[:, :, None] | ~valid[:, None, :]
    num = slots.shape[1]
    gain = 2 * along - gram.diagonal(dim1=1, dim2=2)  # by which one edit lessens ‖r‖²
    pairs = (gain[:, :, None] + gain[:, None, :] - 2 * gram).masked_fill(clash, -torch.inf)
    pairs = pairs.masked_fill(torch.ones(num, num, dtype=torch.bool, device=pairs.device).triu(), -torch.inf)
    top = pairs.flatten(1).topk(min(settings.pairs, num * num), dim=1)
    members = torch.stack([top.indices // num, top.indices % num], 2)
    found, kept = [members], [top.values.isfinite()]
    beam, gains = members[:, : settings.sets], top.values[:, : settings.sets]
    for _ in range(settings.largest - 2):
        cross = _rows(gram, beam).sum(2)  # (c, s, k): Σ of the set's products with each edit
        longer = gains[..., None] + gain[:, None] - 2 * cross
        longer = longer.masked_fill(_rows(clash, beam).any(2), -torch.inf)
        longer = longer.masked_fill(longer <= gains[..., None], -torch.inf)  # only where less is left
        extended = longer.flatten(1).topk(min(4 * settings.sets, longer[0].numel()), dim=1)
        parents = beam.gather(1, (extended.indices // num)[..., None].expand(-1, -1, beam.shape[2]))
        sets = torch.cat([parents, (extended.indices % num)[..., None]], 2).sort(2).values
        fresh = extended.values.isfinite() & ~_repeated(sets)
        order = torch.where(fresh, extended.values, -torch.inf).topk(min(settings.sets, fresh.shape[1]), dim=1)
        beam = sets.gather(1, order.indices[..., None].expand(-1, -1, sets.shape[2]))
        gains = order.values
        if not bool(gains.isfinite().any()):
            break
        found.append(beam)
        kept.append(gains.isfinite())
    width = max(part.shape[2] for part in found)
    padded = torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[2]), value=EMPTY) for p in found], 1)
    flat, missing = padded.clamp_min(0).flatten(1)[..., None].expand(-1, -1, 2), (padded < 0)[..., None]
    shape = (*padded.shape, 2)
    chosen_slots = slots.gather(1, flat).view(shape).masked_fill(missing, EMPTY)
    return EditSets(chosen_slots.flatten(2), values.gather(1, flat).view(shape).flatten(2), torch.cat(kept, 1))


def _rows(matrix: Tensor, index: Int[Tensor, "c s m"]) -> Tensor:
    """matrix[c, index[c, s, m]] as (c, s, m, k)."""
    flat = index.flatten(1)
    picked = matrix.gather(1, flat[..., None].expand(-1, -1, matrix.shape[2]))
    return picked.unflatten(1, index.shape[1:])


def _repeated(sets: Int[Tensor, "c s m"]) -> Bool[Tensor, "c s"]:
    """Whether an earlier set of the same text has the same members."""
    same = (sets[:, :, None] == sets[:, None]).all(3)
    return same.tril(-1).any(2)
