"""What readers of block 0's attention module say of a position, and when an error counts as rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.linalg.gap import Gap

FAR = 0.1  # a relative error of a recomputed row that only a wrong token has
_ROUNDINGS = 16  # a zero is this many units in the last place of the evidence
_COARSEST = 1e-3
_SUMS = 256  # roundings that sums over a width and a text leave, generously


def zero_error(dtype: torch.dtype) -> float:
    """What the evidence's precision leaves of a zero error."""
    return min(_ROUNDINGS * torch.finfo(dtype).eps, _COARSEST)


def rounding_error(dtype: torch.dtype) -> float:
    """The largest error that rounding alone explains: of the evidence as it was sent, and of the sums behind it."""
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    return max(torch.finfo(dtype).eps, _SUMS * torch.finfo(computed).eps)


@dataclass(frozen=True)
class Choice:
    """The token of a position, the relative error of its recomputed row, and that of the next best token.

    `equals` are all tokens with its input, this one included, where it is not alone; they are not the next best.
    """

    token: int
    error: float
    rejected: float
    num_tested: int
    equals: tuple[int, ...] = ()

    def is_clear(self, min_gap_decades: float, precision: torch.dtype) -> bool:
        """Whether this token explains the row of an evidence in that precision, up to rounding, and no other does."""
        gap = Gap(self.error, self.rejected, zero_error(precision))
        return self.error <= rounding_error(precision) and gap.decades >= min_gap_decades


@dataclass(frozen=True)
class AttentionReading:
    """One text: its tokens in order as far as rows could be explained, and how many of the first are beyond doubt."""

    choices: tuple[Choice, ...]
    num_certain: int
    length: int
