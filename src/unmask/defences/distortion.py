"""What a defence costs: how far the update that is sent lies from the one that was meant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence


@dataclass(frozen=True)
class Distortion:
    """Numbers of a whole update, G before and H after; tensors that one of the two lacks count as zero.

    `cosine` ⟨G, H⟩/(‖G‖‖H‖); `relative_norm` ‖H‖/‖G‖; `relative_error` ‖H − G‖/‖G‖; `kept_share`: the share of the
    non-zero entries of G that are not zero in H. An update of zeros that stays one is undistorted: 1, 1, 0, 1. If only
    one of the two is zero, the cosine is 0; if only G is, norm and error are infinite. None is ever NaN.
    """

    cosine: float
    relative_norm: float
    relative_error: float
    kept_share: float


def measure_distortion(before: GradientEvidence, after: GradientEvidence) -> Distortion:
    """Compare two updates over the tensors of both, in float64.

    Says what the defence costs the training, not what it hides.
    """
    sums = torch.zeros(6, dtype=torch.float64)
    for name in sorted({*before.gradients, *after.gradients}):
        sums += _sums(name, before.gradients.get(name), after.gradients.get(name))
    product, square_before, square_after, square_error, num_before, num_kept = sums.tolist()
    norm_before, norm_after, error = math.sqrt(square_before), math.sqrt(square_after), math.sqrt(square_error)
    if norm_before == 0:
        changed = norm_after > 0
        return Distortion(0.0, math.inf, math.inf, 1.0) if changed else Distortion(1.0, 1.0, 0.0, 1.0)
    return Distortion(
        cosine=max(-1.0, min(1.0, product / (norm_before * norm_after))) if norm_after else 0.0,
        relative_norm=norm_after / norm_before,
        relative_error=error / norm_before,
        kept_share=num_kept / num_before,
    )


def _sums(name: str, before: Tensor | None, after: Tensor | None) -> Tensor:
    """⟨G, H⟩, ‖G‖², ‖H‖², ‖H − G‖², the non-zero entries of G, and those of them that are not zero in H."""
    if before is None:
        assert after is not None
        before = torch.zeros_like(after)
    if after is None:
        after = torch.zeros_like(before)
    if before.shape != after.shape:
        raise InputError(
            f"'{name}' had shape {tuple(before.shape)} and now has {tuple(after.shape)}; "
            "compare an update with a defended copy of itself"
        )
    g = before.detach().double().flatten()
    h = after.detach().to(g).flatten()
    numbers = (g @ h, g @ g, h @ h, (h - g).square().sum(), (g != 0).sum(), ((g != 0) & (h != 0)).sum())
    return torch.stack([number.double().cpu() for number in numbers])
