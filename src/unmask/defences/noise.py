"""Random noise on every shared tensor.

Noise is drawn on the CPU and then moved, so that a seed gives the same noise wherever the update lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from unmask.defences.tensorwise import AnyTensors, change_tensors
from unmask.errors import InputError

UnitNoise = Callable[[torch.Size, torch.dtype], Tensor]


def add_gaussian_noise(
    evidence: AnyTensors, sigma: float, generator: torch.Generator, relative: bool = False
) -> AnyTensors:
    """Each tensor G becomes G + s·ε, with ε standard normal and s = sigma, or sigma·rms(G) if `relative`.

    Promises nothing by itself: without clipping per text, no privacy budget follows from sigma. What it hides is
    measured. Zero entries get noise too, except that `relative` noise leaves a zero tensor as it is.
    Source: DAGER, arXiv 2405.15586, which gives sigma as an absolute standard deviation.
    """

    def unit_noise(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return _add_noise(evidence, sigma, relative, unit_noise)


def add_laplace_noise(
    evidence: AnyTensors, sigma: float, generator: torch.Generator, relative: bool = False
) -> AnyTensors:
    """Each tensor G becomes G + s·ε, with ε of Laplace's distribution, scaled to standard deviation 1.

    ε = (ln(1 − u) − ln(1 − v))/√2 with u, v uniform on [0, 1): a difference of two exponential variables. The scale
    b of Laplace's density exp(−|x|/b)/2b is s/√2; s is sigma, or sigma·rms(G) if `relative`, as for Gaussian noise.
    Promises nothing by itself: a budget needs a bound on the ℓ₁ norm of what one text adds, and none is set here.
    """

    def unit_noise(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        u = torch.rand(shape, generator=generator, dtype=dtype)
        v = torch.rand(shape, generator=generator, dtype=dtype)
        return ((-u).log1p() - (-v).log1p()) / math.sqrt(2)

    return _add_noise(evidence, sigma, relative, unit_noise)


def _add_noise(evidence: AnyTensors, sigma: float, relative: bool, unit_noise: UnitNoise) -> AnyTensors:
    if not 0 <= sigma < math.inf:
        raise InputError(f"the noise level sigma must be a finite number from 0 on, got {sigma}")

    def noisy(_: str, gradient: Tensor) -> Tensor:
        deviation = sigma * _rms(gradient) if relative else sigma
        return gradient + (deviation * unit_noise(gradient.shape, gradient.dtype)).to(gradient.device)

    return change_tensors(evidence, noisy)


def _rms(gradient: Tensor) -> float:
    return float(gradient.double().square().mean().sqrt()) if gradient.numel() else 0.0
