"""Coarse numbers: what is left of an update that was sent in 8 or 16 bits.

The tensors come back in the type that they had, with values on the coarse grid: the server computes in float32, and a
grid is seen in the values, not in the type. `compute_dtype`, the precision in which the client trained, stays too.
All save bandwidth; none was made to hide anything. Their error is no noise that was added: it is a function of the
update, zero stays zero, and what is zero or parallel in G is nearly so afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.defences.tensorwise import AnyTensors, change_tensors

_INT8_LARGEST = 127
_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantise_int8(evidence: AnyTensors, generator: torch.Generator | None = None) -> AnyTensors:
    """Each tensor G becomes s·round(G/s), s = max|G|/127: 255 levels a tensor, symmetric around an exact zero.

    Without a generator each entry goes to the nearest level: an error of at most s/2, and entries below s/2 vanish.
    With one it goes to one of its two neighbours at random, so that the expectation is G: an error below s. Promises
    these bounds, up to the rounding of the tensor's own type.
    Source of the random rounding: QSGD, arXiv 1610.02132.
    """

    def round_levels(levels: Tensor) -> Tensor:
        if generator is None:
            return levels.round()
        # 127 + u can round up to 128.
        threshold = torch.rand(levels.shape, generator=generator).to(levels.device)
        return (levels + threshold).floor().clamp(-_INT8_LARGEST, _INT8_LARGEST)

    return change_tensors(evidence, lambda _, gradient: _on_grid(gradient, _INT8_LARGEST, round_levels))


def quantise_fp8(evidence: AnyTensors) -> AnyTensors:
    """Each tensor in float8 (e4m3fn), scaled so that its largest entry becomes 448, the largest number of that type.

    Promises a relative error of at most 2⁻⁴ for entries above max|G|/28672; below, the grid is even, and entries below
    max|G|/458752 vanish.
    """

    def round_levels(levels: Tensor) -> Tensor:
        return levels.float().to(torch.float8_e4m3fn).double()

    return change_tensors(evidence, lambda _, gradient: _on_grid(gradient, _FP8_LARGEST, round_levels))


def quantise_fp16(evidence: AnyTensors) -> AnyTensors:
    """Each entry rounded to the nearest float16, as it is: what mixed precision sends without a scale.

    Promises a relative error of at most 2⁻¹¹ for entries above 6e-5; below, the grid is even, with a step of 6e-8, and
    entries above 65,504 are sent as that.
    """
    top = torch.finfo(torch.float16).max
    return change_tensors(evidence, lambda _, gradient: gradient.clamp(-top, top).half().to(gradient.dtype))


def quantise_bf16(evidence: AnyTensors) -> AnyTensors:
    """Each entry rounded to the nearest bfloat16, whose range is that of float32: no scale is needed.

    Promises a relative error of at most 2⁻⁸ for each entry (half a unit of 2⁻⁷): little is lost but the sharp fall of
    the spectrum.
    """
    return change_tensors(evidence, lambda _, gradient: gradient.bfloat16().to(gradient.dtype))


def _on_grid(gradient: Tensor, largest: float, round_levels: Callable[[Tensor], Tensor]) -> Tensor:
    """Round G·largest/max|G| and scale back, in float64, in which no scale of a float32 tensor becomes zero."""
    if not bool(gradient.any()):
        return gradient
    top = gradient.abs().max().double()
    return (round_levels(gradient.double() / top * largest) / largest * top).to(gradient.dtype)
