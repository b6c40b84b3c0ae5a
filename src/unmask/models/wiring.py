"""How rows flow from module to module: each input is a sum of earlier rows with constant factors.

A residual stream, a scaled embedding, a multiplier on what a block adds, norms before or behind: all of it is
Σ cᵢ·rowsᵢ, and the factors are found by least squares over what one pass recorded. No family's order is written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn

_CLOSE = 1e-4  # relative: a float32 pass rounds to 1e-6, and what is left out is of the order of one
_LARGEST = 64  # denominator of a ratio that is meant
_MEANT = 1e-6  # relative: how near a ratio or a root must be
_SMALL = 1e-4  # relative: parts of a sum below it are none
_ROUNDING = 1e-6  # relative: what a float32 pass leaves of the right sum


@dataclass(frozen=True)
class Sum:
    """Σ cᵢ·rowsᵢ, by the names of rows."""

    factors: Mapping[str, float]

    def __call__(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The sum of rows that are given by name."""
        total: Tensor | None = None
        for name, factor in self.factors.items():
            part = rows[name] if factor == 1 else rows[name] * factor
            total = part if total is None else total + part
        assert total is not None
        return total


def find_sum(wanted: Tensor, known: Mapping[str, Tensor]) -> Sum | None:
    """The sum that gives `wanted`, of rows that have its shape; None if there is none."""
    size, epsilon = wanted.shape[-1], torch.finfo(wanted.dtype).eps
    y = wanted.detach().reshape(-1, size)
    same = {n: r.detach().reshape(-1, size) for n, r in known.items() if r.numel() == y.numel() and r.shape[-1] == size}
    for name, rows in same.items():
        if torch.equal(rows, y):
            return Sum({name: 1.0})
    y, same = y.double(), {name: rows.double() for name, rows in same.items()}
    factors = _fit(y, same)
    # A pass in half precision rounds every sum.
    least, close, rounding = (max(each, 8 * epsilon) for each in (_SMALL, _CLOSE, _ROUNDING))
    least *= float(y.norm())
    kept = _fit(y, {name: same[name] for name, c in factors.items() if abs(c) * float(same[name].norm()) > least})
    error = _error(y, same, kept)
    if not kept or error > close:
        return None
    for name, factor in kept.items():
        plain = plain_number(factor, close)
        if _error(y, same, {**kept, name: plain}) <= max(2 * error, rounding):
            kept[name] = plain
    return Sum(kept)


def plain_number(measured: float, tolerance: float = 1e-6) -> float:
    """The number that was meant: one with few digits, a ratio, or the root of one; else the measured one."""
    short = float(f"{measured:.3g}")
    if abs(short - measured) <= tolerance * abs(measured):
        return short
    ratio = float(Fraction(measured).limit_denominator(_LARGEST))
    root = math.copysign(math.sqrt(Fraction(measured * measured).limit_denominator(_LARGEST)), measured)
    nearest = min(ratio, root, key=lambda plain: abs(plain - measured))
    return nearest if abs(nearest - measured) <= _MEANT * abs(measured) else measured


def _fit(y: Tensor, rows: Mapping[str, Tensor]) -> dict[str, float]:
    """Least squares."""
    if not rows:
        return {}
    A = torch.stack([each.flatten() for each in rows.values()], dim=1)
    scale = A.norm(dim=0).clamp_min(1e-300)
    factors = torch.linalg.lstsq(A.cpu() / scale.cpu(), y.cpu().flatten()[:, None], driver="gelsd").solution[:, 0]
    return dict(zip(rows, (factors / scale.cpu()).tolist(), strict=True))


def _error(y: Tensor, rows: Mapping[str, Tensor], factors: Mapping[str, float]) -> float:
    """How much of y a sum leaves, relative to y."""
    total = sum((rows[name] * factor for name, factor in factors.items()), torch.zeros_like(y))
    return float((total - y).norm() / y.norm().clamp_min(1e-300))


@dataclass(frozen=True)
class RowFlow:
    """Rows that follow from others: modules by name, and what each of them is given."""

    steps: Mapping[str, Sum] = field(default_factory=dict)

    def evaluate(self, wanted: Sum, given: Mapping[str, Tensor], module: Callable[[str], nn.Module]) -> Tensor:
        """A sum of rows, computed from those that are given."""
        rows = dict(given)
        for name in self.needed(wanted, given):
            rows[name] = module(name)(self.steps[name](rows))
        return wanted(rows)

    def needed(self, wanted: Sum, given: Iterable[str]) -> list[str]:
        """Steps that lead from what is given to a sum, in order; KeyError where something else is needed."""
        order: list[str] = []

        def visit(part: Sum) -> None:
            for name in part.factors:
                if name not in given and name not in order:
                    visit(self.steps[name])
                    order.append(name)

        visit(wanted)
        return order

    def leads_to(self, wanted: Sum | None, given: Iterable[str]) -> bool:
        """Whether a sum follows from what is given."""
        try:
            return wanted is not None and self.needed(wanted, given) is not None
        except KeyError:
            return False
