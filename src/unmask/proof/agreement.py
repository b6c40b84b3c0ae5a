"""How well a replayed update agrees with the one that was seen, tensor by tensor.

    misfit = max over tensors ‖G − s·Ĝ‖ / ‖G‖

Notation: as in `replay.py`. Source: measured for this project.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence, Update
from unmask.proof.gradient_sketches import Sketch

_FLOAT32 = 5e-5  # a right batch is within 5e-6 in float32; one token more among 3,000 changes every tensor by 3e-4
_FLOAT64 = 1e-7  # what differences of sums of squares can show
_TRAINED = 2e-3  # local steps in float32: a right batch is within 1e-4, a wrong one beyond 1e-1
_COARSE = 2e-2  # a client in bfloat16 rounds every product
_QUIET = 0.1  # of the typical entry: a tensor with smaller ones is mostly the rounding of larger terms (key biases)
_ENTRIES_AT_ONCE = 2**22
_ENTRIES_A_ROW = 2**12  # whose squares are summed up in float32
_MANY = 2**17  # entries, from which on that is quicker
_LEAST_SQUARED = 1e-12  # of the largest entry: squares of those that are 1e-7 of it are still float32's normal numbers
_NORMALISED = 0.75  # the quantile of tensors that counts where Adam has blown up the rounding of gradients that are 0


@dataclass(frozen=True)
class Products:
    """⟨G, G⟩, ⟨G, Ĝ⟩ and ⟨Ĝ, Ĝ⟩ of one tensor, in float64, and its number of entries."""

    seen: float
    mixed: float
    again: float
    num_entries: int

    def distance(self, scale: float) -> float:
        """‖G − s·Ĝ‖; infinite where the numbers are too large to be squared."""
        squared = self.seen - 2 * scale * self.mixed + scale * scale * self.again
        return max(squared, 0.0) ** 0.5 if math.isfinite(squared) else math.inf


@dataclass(frozen=True)
class Agreement:
    """How well a replay fits the update: the largest relative difference of a tensor, and what would be too much.

    `scale` is the factor that fits best; where it is not 1, `misfit` says what is left if it is taken out, and
    `misfit_as_is` what is left if not.
    """

    misfit: float
    misfit_as_is: float
    scale: float
    tolerance: float
    worst: str
    num_tensors: int

    @property
    def holds(self) -> bool:
        """Whether the update is what these texts give, without any factor."""
        return self.num_tensors > 0 and self.misfit_as_is <= self.tolerance

    @property
    def holds_up_to_scale(self) -> bool:
        """Whether it is a positive multiple of that: clipped, or with an unknown learning rate."""
        return self.num_tensors > 0 and self.scale > 0 and self.misfit <= self.tolerance


def agree(
    evidence: GradientEvidence,
    again: Mapping[str, Tensor | Sketch],
    *,
    tolerance: float | None = None,
    by_token: Collection[str] = (),
    equal: Sequence[tuple[int, ...]] = (),
) -> Agreement:
    """Compare an update with its replay, tensor by tensor; tensors that only one of them has are left out.

    Tensors `by_token` have a row for each token; rows of `equal` tokens are added up before they are compared. Of
    layers that were sketched, the sketches are compared.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(set(evidence.gradients) & set(again)):
        seen, other = evidence.gradients[name], again[name]
        left, right = (other.of(seen), other.value) if isinstance(other, Sketch) else (seen, other)
        if name in by_token and equal:
            left, right = merge_rows(left, equal), merge_rows(right, equal)
        pairs[name] = left, right
    tolerance = tolerance_of(evidence) if tolerance is None else tolerance
    quantile = _NORMALISED if evidence.optimizer == "adamw" else 1.0
    sizes = {name: evidence.gradients[name].numel() for name in pairs}
    quick = {name: products_at_one(*pair, sizes[name]) for name, pair in pairs.items()}
    found = agreement_of(quick, tolerance, quantile)
    if found.holds:
        return found
    return agreement_of({name: exact_products(*pair, sizes[name]) for name, pair in pairs.items()}, tolerance, quantile)


def agreement_of(products: Mapping[str, Products], tolerance: float, quantile: float = 1.0) -> Agreement:
    """The agreement that products of tensors show; `quantile` 1 counts the worst tensor, less forgives the others."""
    total = sum(part.again for part in products.values())
    scale = sum(part.mixed for part in products.values()) / total if total > 0 else 0.0
    scale = scale if math.isfinite(scale) else 0.0
    sizes = {name: (part.seen / part.num_entries) ** 0.5 for name, part in products.items() if part.num_entries}
    typical = statistics.median(size if math.isfinite(size) else 0.0 for size in sizes.values()) if sizes else 0.0

    def misfits(factor: float) -> dict[str, float]:
        distances = {name: products[name].distance(factor) for name in sizes}
        floors = {name: _QUIET * typical * products[name].num_entries ** 0.5 for name in sizes}
        return {
            name: distance / max(products[name].seen ** 0.5, floors[name], 1e-300) if distance < math.inf else math.inf
            for name, distance in distances.items()
        }

    fitted, as_is = misfits(scale), misfits(1.0)
    if not sizes:
        return Agreement(float("inf"), float("inf"), scale, tolerance, "", 0)
    place = round(quantile * (len(sizes) - 1))
    worst = sorted(as_is, key=lambda name: as_is[name])[place]
    return Agreement(sorted(fitted.values())[place], as_is[worst], scale, tolerance, worst, len(sizes))


def tolerance_of(evidence: GradientEvidence) -> float:
    """The relative difference that the precision of an update leaves of a right batch."""
    if evidence.compute_dtype in (torch.bfloat16, torch.float16):
        return _COARSE
    if evidence.update is Update.DELTA:
        return _TRAINED
    return _FLOAT64 if _is_double(evidence) else _FLOAT32


def _is_double(evidence: GradientEvidence) -> bool:
    return evidence.compute_dtype is torch.float64 and all(
        g.dtype is torch.float64 for g in evidence.gradients.values()
    )


def merge_rows(tensor: Tensor, equal: Sequence[tuple[int, ...]]) -> Tensor:
    """Rows of equal tokens added up in the first of them."""
    merged = tensor.clone()
    for members in equal:
        merged[members[0]] = tensor[list(members)].sum(0)
        merged[list(members[1:])] = 0
    return merged


def products_at_one(seen: Tensor, again: Tensor, num_entries: int) -> Products:
    """By the norm of the difference, taken in the tensors' own precision: exact where the factor is 1, and quick."""
    of_seen = of_again = difference = 0.0
    for g, h in _pieces(seen, again):
        of_seen, of_again = of_seen + _sum_of_squares(g), of_again + _sum_of_squares(h)
        difference += _sum_of_squares(g - h)
    return Products(of_seen, (of_seen + of_again - difference) / 2, of_again, num_entries)


def _sum_of_squares(tensor: Tensor) -> float:
    """Squares summed up in float64, a few thousand at a time in float32 where none of them can vanish or overflow."""
    flat = tensor.reshape(-1)
    whole = len(flat) - len(flat) % _ENTRIES_A_ROW
    if flat.dtype is not torch.float32 or len(flat) < _MANY:
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())
    least, most = torch.aminmax(flat)
    largest = float(torch.maximum(-least, most))
    if not (largest == 0 or _LEAST_SQUARED < largest < 1 / _LEAST_SQUARED):
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())  # also where it is not finite
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ENTRIES_A_ROW), dim=1)
    return float(rows.double().square().sum() + flat[whole:].double().square().sum())


def exact_products(seen: Tensor, again: Tensor, num_entries: int) -> Products:
    """In float64: differences of 1e-7 must not drown in the sums."""
    sums = torch.zeros(3, dtype=torch.float64)
    for left, right in _pieces(seen, again):
        g, h = left.double(), right.double()
        sums += torch.stack([g @ g, g @ h, h @ h]).cpu()
    of_seen, mixed, of_again = sums.tolist()
    return Products(of_seen, mixed, of_again, num_entries)


def _pieces(seen: Tensor, again: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors side by side, a part at a time."""
    parts = (part.detach().flatten().split(_ENTRIES_AT_ONCE) for part in (seen, again.to(seen.device)))
    return zip(*parts, strict=True)
