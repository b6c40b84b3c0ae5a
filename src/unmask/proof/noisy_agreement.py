"""The client, run again, where the update has few digits or carries noise: is it what was sent, and would less show?

    digits  the replayed numbers lie where storing them gives the update, entry by entry (`distance_to_cells`)
    noise   what is left of the update has no structure: in no matrix does a direction stand out of the spectrum that
            independent noise of this size has

Either says nothing if a nearly right batch passes too. One label more or less among N changes the update by about 1/N,
so the replay must fail when it is made larger by that factor: else the digits or the noise hide it.

Limits: noise is tested in some matrices of every part of the model, not in all; a change that is far below the noise in
all of them is not seen, which is what the factor asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.coarse import Coarseness, Storage, distance_to_cells, storage_of
from unmask.linalg.noise import noise_edge
from unmask.progress import track
from unmask.proof.agreement import Agreement

_DIGITS = 5e-5  # of a tensor's norm: what float32 leaves of a right batch
_QUIET = 0.1  # of the typical entry: a tensor with smaller ones is mostly the rounding of larger terms
_STRUCTURE = 1.05  # of the largest singular value that noise has: a right batch stays below
_TELLING = 1.5  # the same for the batch that must fail
_MOST_MATRICES = 24
_SHOWN = 4096  # entries in which a grid shows
_NARROWEST = 32  # the shorter side of a matrix whose spectrum tells


class Loss(Enum):
    """What stands between the client's numbers and those that were sent."""

    DIGITS = "few digits"
    NOISE = "noise"


@dataclass(frozen=True)
class NoisyAgreement:
    """How a replay fits what was sent, and whether one label more or less would show."""

    loss: Loss
    agreement: Agreement
    is_telling: bool

    @property
    def holds(self) -> bool:
        """Whether the update is what these texts give, and nearly the same texts give another one."""
        return self.agreement.holds and self.is_telling


def loss_of(evidence: GradientEvidence) -> Loss:
    """Few digits, if most of the large tensors show them; else noise."""
    large = [g for g in evidence.gradients.values() if g.ndim > 1]
    coarse = [storage_of(g).kind is not Coarseness.FINE for g in large[:: max(1, len(large) // _MOST_MATRICES)]]
    return Loss.DIGITS if 2 * sum(coarse) > len(coarse) else Loss.NOISE


def agree_with_noise(evidence: GradientEvidence, again: Mapping[str, Tensor], num_labels: int) -> NoisyAgreement:
    """Compare an update with its replay, as its digits or its noise allow."""
    names = sorted(set(evidence.gradients) & set(again))
    more = 1 + 1 / max(1, num_labels)
    loss = loss_of(evidence)
    compare: Callable[[float], Iterator[tuple[str, float]]]
    if loss is Loss.DIGITS:
        compare = partial(_misfits, evidence, again, _storages(evidence, names))
        tolerance, telling = _DIGITS, 20 * _DIGITS
    else:
        compare = partial(_structures, evidence, again, _matrices(evidence, names))
        tolerance, telling = _STRUCTURE, _TELLING
    right = dict(compare(1.0))
    if not right:
        return NoisyAgreement(loss, Agreement(float("inf"), float("inf"), 1.0, tolerance, "", 0), False)
    worst = max(right, key=lambda name: right[name])
    agreement = Agreement(right[worst], right[worst], 1.0, tolerance, worst, len(right))
    is_telling = agreement.holds and any(misfit > telling for _, misfit in compare(more))
    return NoisyAgreement(loss, agreement, is_telling)


def _storages(evidence: GradientEvidence, names: Sequence[str]) -> dict[str, Storage]:
    """How tensors were stored; without those of few entries that show no grid, as a few hundred do not show int8's."""
    found = {name: storage_of(evidence.gradients[name]) for name in track(names, "reading digits")}
    return {
        name: storage
        for name, storage in found.items()
        if storage.kind is not Coarseness.FINE or evidence.gradients[name].numel() >= _SHOWN
    }


def _misfits(
    evidence: GradientEvidence, again: Mapping[str, Tensor], storages: Mapping[str, Storage], scale: float
) -> Iterator[tuple[str, float]]:
    """Of every tensor how far the replay is outside of what was stored, relative to its norm."""
    names = list(storages)
    sizes = {name: float(torch.linalg.vector_norm(evidence.gradients[name], dtype=torch.float64)) for name in names}
    entries = {name: evidence.gradients[name].numel() ** 0.5 for name in names}
    typical = sorted(sizes[name] / entries[name] for name in names)[len(names) // 2] if names else 0.0
    for name in track(names, "comparing digits"):
        outside = float(distance_to_cells(evidence.gradients[name], scale * again[name], storages[name]).norm())
        yield name, outside / max(sizes[name], _QUIET * typical * entries[name], 1e-300)


def _matrices(evidence: GradientEvidence, names: Sequence[str]) -> list[str]:
    """Some matrices from all parts of the model; not those of the vocabulary, which are the largest."""
    shapes = {name: evidence.gradients[name].shape for name in names if evidence.gradients[name].ndim == 2}
    wide = [name for name, shape in shapes.items() if min(shape) >= _NARROWEST]
    small = sorted(wide, key=lambda name: shapes[name].numel())
    usual = (
        [name for name in wide if shapes[name].numel() <= 8 * shapes[small[len(small) // 2]].numel()] if wide else []
    )
    return usual[:: max(1, len(usual) // _MOST_MATRICES)]


def _structures(
    evidence: GradientEvidence, again: Mapping[str, Tensor], names: Sequence[str], scale: float
) -> Iterator[tuple[str, float]]:
    """Of some matrices the largest singular value of what is left, over the largest that noise of its size has."""
    for name in names:
        rest = evidence.gradients[name].double() - scale * again[name].to(evidence.gradients[name].device).double()
        rest = rest if rest.shape[0] <= rest.shape[1] else rest.T
        d, m = rest.shape
        sigma = float(rest.square().mean().sqrt())
        largest = float(torch.linalg.eigvalsh(rest @ rest.T)[-1].clamp_min(0).sqrt())
        yield name, largest / max(noise_edge(d, m, sigma), 1e-300)
