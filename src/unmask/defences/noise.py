"""Gaussian noise on every shared tensor."""

from __future__ import annotations

from dataclasses import replace

import torch

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence


def add_gaussian_noise(evidence: GradientEvidence, relative: float, generator: torch.Generator) -> GradientEvidence:
    """Each tensor G becomes G + relative·rms(G)·ε, with ε standard normal.

    Promises nothing by itself: without clipping per text there is no privacy budget. What it hides is measured.
    """
    if relative < 0:
        raise InputError(f"the noise level must be 0 or more, got {relative}")
    noisy = {}
    for name, gradient in evidence.gradients.items():
        scale = relative * float(gradient.double().square().mean().sqrt())
        noise = torch.randn(gradient.shape, generator=generator).to(gradient)
        noisy[name] = gradient + scale * noise
    return replace(evidence, gradients=noisy)
