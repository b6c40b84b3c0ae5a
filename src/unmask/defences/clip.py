"""Clipping: a bound on the norm of what a client sends."""

from __future__ import annotations

import math

from unmask.defences.tensorwise import AnyTensors, change_tensors
from unmask.errors import InputError


def clip_norm(evidence: AnyTensors, max_norm: float) -> AnyTensors:
    """The whole update G becomes G·min(1, max_norm/‖G‖₂), the norm taken over all tensors together, in float64.

    Promises that no client moves the average by more than max_norm, up to the rounding of the tensors' type; with noise
    of a known sigma, a privacy budget *per client* follows. Hides nothing by itself: the direction stays, and with it
    every span, every zero row and every sign. It is not the clipping per text of DP-SGD.
    """
    if not 0 < max_norm < math.inf:
        raise InputError(f"the largest norm max_norm must be a finite number above 0, got {max_norm}")
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in evidence.named_tensors().values()))
    if norm <= max_norm:
        return evidence
    return change_tensors(evidence, lambda _, gradient: gradient * (max_norm / norm))
