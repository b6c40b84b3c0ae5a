"""What was lost when numbers were stored coarsely: on a grid of few levels, with few digits, or only some of them.

The kinds are told apart by the values alone, whatever their type says:

    even      v = k·s with whole k (int8): every entry is off by up to s/2, a variance of s²/12
    digits    v has p binary digits (bfloat16, float16), or is one of few levels that lie closer near zero (float8):
              the variance is Δ(v)²/12 with Δ(v) the distance of neighbouring levels at v
    largest   entries below some τ became zero (top-k pruning): those have a variance of at most τ²/3, the others none
    thinned   entries became zero at random, a share p is left: v estimates p·G, with a mean variance of (1 − p)·v²

Limits: an error is a function of the entry, not independent of it. Where most entries are below half a step, it is the
entry itself and not noise; the variance given then is an upper bound. A tensor of ordinary floats has no variance here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

_SAMPLE = 2**18  # entries that levels are looked for in
_NUM_LARGEST = 256  # entries that levels are looked for in as well
_MAX_LEVELS = 512  # int8 has 255 levels, float8 253; a float32 tensor of this many entries has nearly as many values
_ON_GRID = 2e-3  # of a step: float32's rounding of 127 steps is 1e-5
_MOST_STEPS = 1024  # from zero to the largest entry of an even grid; float8 has 458,752 of its smallest steps
_FEW_DIGITS = (torch.bfloat16, torch.float16)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
_DECIMALS = range(7)
_FEWEST = 4  # values that a common step is looked for in
_SPARSE = 0.05  # share of zeros that no ordinary gradient has outside of whole rows and columns
_THRESHOLDED = 0.01  # of the median entry: magnitudes that are left reach down further only if chance chose them


class Coarseness(Enum):
    """How the entries of a tensor were stored."""

    FINE = "ordinary floats"
    EVEN = "an even grid of few levels"
    DIGITS = "few binary digits"
    LARGEST = "the largest entries alone, the others zero"
    THINNED = "some entries alone, chosen at random, the others zero"


@dataclass(frozen=True)
class Storage:
    """The kind, the step of an even grid (else the smallest entry that is not zero), and the share of exact zeros."""

    kind: Coarseness
    step: float
    zero_share: float
    levels: Float[Tensor, " levels"] | None = None  # of an uneven grid
    dtype: torch.dtype = torch.bfloat16  # whose digits the entries have, where these are few


def storage_of(tensor: Tensor) -> Storage:
    """How a tensor was stored. Rows and columns that are zero throughout tell nothing and are left out."""
    values = _sample(tensor)
    zero_share = float((values == 0).double().mean()) if len(values) else 1.0
    nonzero = values[values != 0]
    if len(nonzero) == 0:
        return Storage(Coarseness.FINE, 0.0, zero_share)
    smallest = float(nonzero.abs().min())
    levels = torch.unique(torch.cat([values, _largest(tensor)]))
    if len(levels) <= min(_MAX_LEVELS, len(nonzero) // 4):
        step = even_step(levels)
        if step is not None and not _grows(levels, step):
            return Storage(Coarseness.EVEN, step, zero_share)
        return Storage(Coarseness.DIGITS, smallest, zero_share, levels)
    is_half = smallest < torch.finfo(torch.float16).smallest_normal and _has_digits(nonzero, torch.float16)
    if zero_share > _SPARSE and not is_half:  # small numbers become zero in float16
        is_cut = smallest > _THRESHOLDED * float(nonzero.abs().median())
        return Storage(Coarseness.LARGEST if is_cut else Coarseness.THINNED, smallest, zero_share)
    for narrow in _FEW_DIGITS:
        if _has_digits(nonzero, narrow):
            return Storage(Coarseness.DIGITS, smallest, zero_share, dtype=narrow)
    return Storage(Coarseness.FINE, smallest, zero_share)


def _grows(levels: Float[Tensor, " levels"], step: float) -> bool:
    """Whether levels on a grid of small steps are those of float8, whose steps grow with the numbers.

    Where all but a few numbers are near zero, they are whole multiples of its smallest step. But above 16 of them, only
    numbers of four binary digits occur; the largest entry of an int8 tensor is 127 steps.
    """
    counts = (levels.abs() / step).round()
    digits = 2.0 ** (counts.clamp_min(1).log2().floor() - 3)
    return bool(counts.max() > 16) and bool((counts % digits.clamp_min(1) == 0).all())


def _has_digits(values: Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).double() == values).all())


def relative_rounding(tensor: Tensor) -> float:
    """How coarsely the entries were rounded, relative to the largest: the precision of their type, or of what shows.

    Entries of a wide type may all be numbers of a narrow one, decimals, or multiples of some step (int8). Works for few
    entries, as a common step is found by Euclid's algorithm.
    """
    values = tensor.detach().cpu().flatten()
    largest = float(values.abs().max().clamp_min(1e-300)) if len(values) else 1.0
    seen = [torch.finfo(tensor.dtype).eps]
    seen += [torch.finfo(t).eps for t in _NARROW if torch.equal(values.to(t).double(), values.double())][:1]
    decimals = decimal_step(values, _DECIMALS)
    seen += [] if decimals is None else [decimals / largest]
    step = common_step(values.double() / largest, max(1e-8, 100 * torch.finfo(tensor.dtype).eps))
    return max([*seen, step or 0.0])


def decimal_step(values: Float[Tensor, " n"], decimals: Iterable[int]) -> float | None:
    """The last decimal that values are written with, the fewest of `decimals` first; None if they have more."""
    exact = values.double()
    kept = (k for k in decimals if torch.equal(exact.round(decimals=k).to(values), values))
    return next((10.0**-k for k in kept), None)


def common_step(values: Float[Tensor, " n"], tolerance: float) -> float | None:
    """The largest step that values of up to 1 are multiples of, within a tolerance; None if there is none.

    Steps of up to a hundred tolerances are chance.
    """
    step = 0.0
    for rest in values.abs().tolist():
        while rest > tolerance:
            step, rest = rest, abs(step - rest * round(step / rest))
    return step if step > 100 * tolerance and len(values) >= _FEWEST else None


def storage_variance(tensor: Tensor) -> Float[Tensor, "*shape"] | None:
    """The variance of each entry's error, as the card of this module states it; None for ordinary floats."""
    storage = storage_of(tensor)
    values = tensor.double()
    if storage.kind is Coarseness.FINE:
        return None
    if storage.kind is Coarseness.EVEN:
        return torch.full_like(values, storage.step**2 / 12)
    if storage.kind is Coarseness.LARGEST:
        return torch.where(values == 0, storage.step**2 / 3, (torch.finfo(torch.float32).eps * values).square())
    if storage.kind is Coarseness.THINNED:
        return storage.zero_share * values.square()
    if storage.levels is None:
        return rounding_variance(values, storage.dtype)
    return _spacing(storage.levels)[_nearest(storage.levels, values)].square() / 12


def rounding_variance(values: Tensor, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Of numbers rounded to the nearest of a float type: Δ²/12 with Δ the distance of its neighbouring numbers."""
    return _digit(values, dtype).square() / 12


def distance_to_cells(seen: Tensor, again: Tensor, storage: Storage | None = None) -> Float[Tensor, "*shape"]:
    """How far numbers are from what could have been stored as the entries seen: zero if storing them gives just these.

    Of entries that were left out by chance nothing is known; those that were too small to be sent are below what was.
    `storage`: how they were stored, where that was looked at before.
    """
    storage = storage or storage_of(seen)
    values = seen.double()
    far = (again.to(seen.device).double() - values).abs()
    if storage.kind is Coarseness.EVEN:
        return (far - storage.step / 2).clamp_min(0)
    if storage.kind is Coarseness.DIGITS and storage.levels is None:
        return (far - _digit(values, storage.dtype) / 2).clamp_min(0)
    if storage.kind is Coarseness.DIGITS:
        levels = torch.unique(values)  # rare ones may not be in the sample
        middles, ends = (levels[1:] + levels[:-1]) / 2, levels.new_full((1,), float("inf"))
        nearest, numbers = _nearest(levels, values), again.to(seen.device).double()
        low, high = torch.cat([-ends, middles])[nearest], torch.cat([middles, ends])[nearest]
        return (low - numbers).clamp_min(0) + (numbers - high).clamp_min(0)
    if storage.kind is Coarseness.THINNED:
        return torch.where(values == 0, 0.0, far)
    return torch.where(values == 0, (far - storage.step).clamp_min(0), far)  # a few zeros may be small entries too


def _digit(values: Tensor, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The distance of neighbouring numbers of a float type, at some values."""
    least = torch.finfo(dtype).smallest_normal
    exponents = values.double().abs().clamp_min(least).log2().floor()
    return torch.finfo(dtype).eps * 2.0**exponents


def _sample(tensor: Tensor) -> Float[Tensor, " n"]:
    """Entries of the rows and columns that are not zero throughout, in float64, evenly taken."""
    matrix = tensor.detach().reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.detach()[None]
    matrix = matrix[(matrix != 0).any(1)]
    matrix = matrix[:, (matrix != 0).any(0)] if len(matrix) else matrix
    flat = matrix.flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)].double()


def _largest(tensor: Tensor) -> Float[Tensor, " n"]:
    """The largest entries, which a sample may miss."""
    flat = tensor.detach().flatten()
    return flat[flat.abs().topk(min(_NUM_LARGEST, len(flat))).indices].double()


def even_step(levels: Float[Tensor, " levels"]) -> float | None:
    """The step of a grid through zero that all levels lie on; None if there is none."""
    magnitudes = torch.unique(levels.abs())
    gaps = torch.diff(magnitudes, prepend=magnitudes.new_zeros(1))
    step = float(gaps[gaps > 0].min())
    if magnitudes[-1] > _MOST_STEPS * step:
        return None
    counts = magnitudes / step
    return step if bool(((counts - counts.round()).abs() < _ON_GRID * counts.clamp_min(1)).all()) else None


def _spacing(levels: Float[Tensor, " levels"]) -> Float[Tensor, " levels"]:
    """The mean distance of each level to its two neighbours."""
    gaps = torch.diff(levels)
    return (torch.cat([gaps[:1], gaps]) + torch.cat([gaps, gaps[-1:]])) / 2


def _nearest(levels: Float[Tensor, " levels"], values: Tensor) -> Tensor:
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.searchsorted(middles, values.contiguous())
