"""Defences of stored embeddings: fewer numbers, signs alone, a secret rotation, and noise with a privacy budget.

    cut       e → e[:k]
    signs     e → sign(e)·rms(e): one bit a number
    rotate    e → e·Q with a random orthogonal Q that is kept secret: all distances stay
    private   e → e/max(1, ‖e‖) + σ·ε: (ε, δ)-private for each text by itself, whatever it is

σ is the least that Balle and Wang's condition allows: with a sensitivity Δ = 2, the largest distance of two vectors of
length 1,

    Φ(Δ/2σ − εσ/Δ) − exp(ε)·Φ(−Δ/2σ − εσ/Δ) ≤ δ

Limits: a rotation promises nothing against somebody who knows the texts of about as many vectors as they have numbers:
least squares give Q. Cuts and signs promise nothing at all; what they hide is measured.
Source: Balle, Wang, arXiv 1805.06530, Theorem 8.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor

from unmask.arguments import require_count
from unmask.defences.tensorwise import AnyTensors, change_tensors
from unmask.errors import InputError
from unmask.evidence.vectors import VectorEvidence
from unmask.linalg.product_codes import sign_centroids

_SENSITIVITY = 2.0


def cut_dimensions(evidence: VectorEvidence, dimensions: int, renormalise: bool = False) -> VectorEvidence:
    """The first numbers of each vector, at length 1 again if `renormalise`; the recipe says so, as a width shows."""
    require_count("dimensions", dimensions)
    if dimensions > evidence.width:
        raise InputError(f"dimensions must be at most {evidence.width}, the width of the vectors, got {dimensions}")
    if dimensions == evidence.width:
        return evidence
    vectors = evidence.vectors[:, :dimensions]
    if renormalise:
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    recipe = replace(evidence.recipe, dimensions=dimensions, renormalise=renormalise or evidence.recipe.renormalise)
    return replace(evidence, vectors=vectors, recipe=recipe, half_steps=None, quantiser=None, offsets=None, error=None)


def keep_signs(evidence: VectorEvidence) -> VectorEvidence:
    """The sign of each number, at the length that the vector had; that it is a sign is seen (`quantiser`)."""

    def signs(_: str, vector: Tensor) -> Tensor:
        return torch.where(vector < 0, -1.0, 1.0).to(vector) * vector.square().mean().sqrt()

    changed = change_tensors(evidence, signs)
    return replace(changed, quantiser=sign_centroids(evidence.width).to(changed.vectors))


def rotate_secretly(evidence: VectorEvidence, generator: torch.Generator) -> VectorEvidence:
    """All vectors turned by one random orthogonal matrix, which nobody who reads the store knows."""
    gaussian = torch.randn(evidence.width, evidence.width, generator=generator, dtype=torch.float64)
    rotation, triangle = torch.linalg.qr(gaussian)
    rotation = (rotation * triangle.diagonal().sign()).to(evidence.vectors.device)  # uniform over all rotations
    return change_tensors(evidence, lambda _, vector: (vector.double() @ rotation).to(vector))


def add_private_noise(evidence: AnyTensors, epsilon: float, delta: float, generator: torch.Generator) -> AnyTensors:
    """Gaussian noise that makes each vector (ε, δ)-private, behind a clip to length 1."""
    sigma = private_sigma(epsilon, delta)

    def noisy(_: str, vector: Tensor) -> Tensor:
        clipped = vector / vector.norm().clamp_min(1)
        return clipped + sigma * torch.randn(vector.shape, generator=generator, dtype=vector.dtype).to(vector.device)

    return change_tensors(evidence, noisy)


def private_sigma(epsilon: float, delta: float) -> float:
    """The least standard deviation that makes a vector of length at most 1 (ε, δ)-private."""
    if not 0 < epsilon < math.inf or not 0 < delta < 1:
        raise InputError(f"a budget needs a finite epsilon above 0 and a delta between 0 and 1, got {epsilon}, {delta}")

    def excess(log_sigma: float) -> float:
        ratio = math.exp(log_sigma) / _SENSITIVITY
        first, second = log_ndtr(0.5 / ratio - epsilon * ratio), log_ndtr(-0.5 / ratio - epsilon * ratio)
        return math.exp(first) - math.exp(min(0.0, epsilon + second)) - delta

    return float(math.exp(brentq(excess, math.log(1e-6), math.log(1e9), xtol=1e-12)))
