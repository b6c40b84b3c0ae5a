"""The span of gradients by a full singular value decomposition: slow, obvious, and told the rank."""

from __future__ import annotations

import torch
from torch import Tensor


def svd_singular_values(*gradients: Tensor) -> Tensor:
    """Singular values of the gradients side by side, each scaled to norm 1."""
    return torch.linalg.svdvals(_side_by_side(gradients))


def svd_projector(*gradients: Tensor, rank: int) -> Tensor:
    """UUᵀ of the `rank` strongest left singular vectors; unlike a basis, it is unique."""
    left, _, _ = torch.linalg.svd(_side_by_side(gradients), full_matrices=False)
    return left[:, :rank] @ left[:, :rank].T


def svd_distance(projector: Tensor, rows: Tensor) -> Tensor:
    """‖x − UUᵀx‖ / ‖x‖, one row after the other."""
    return torch.stack([(row - projector @ row).norm() / row.norm() for row in rows.double()])


def _side_by_side(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.double() / gradient.double().norm() for gradient in gradients], dim=1)
