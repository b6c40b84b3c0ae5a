"""A cloaked cache: each head's keys and values are mixed by a secret invertible matrix that only the server holds.

    k ↦ k·A_h,   v ↦ v·B_h        A_h, B_h (e, e), the same for all tokens of the cache, condition number 4

The server undoes it before it attends, so answers stay as they are, up to rounding. Promises that a reader without the
matrices cannot compare a cache with a recomputed one. It promises nothing to a reader who has pairs of texts and caches
under the same matrices: e such tokens give them away, so they must be changed often.
Source: KV-Cloak, arXiv 2508.09442, which adds a permutation of the tokens within a block and further masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.defences.tensorwise import AnyTensors, change_tensors
from unmask.errors import InputError
from unmask.evidence.caches import CacheEvidence

_LEAST, _LARGEST = 0.5, 2.0  # singular values


def cloak_cache(evidence: AnyTensors, generator: torch.Generator) -> AnyTensors:
    """The cache as it is stored under matrices that are drawn from the generator."""
    if not isinstance(evidence, CacheEvidence):
        raise InputError(
            f"'cloak' mixes the keys and values of a cache, got {type(evidence).__name__}; choose another defence"
        )
    secrets = {
        f"{head:04d}/{name}": _random_matrix(part.shape[3], generator)
        for name, part in evidence.parts.items()
        for head in range(part.shape[2])
    }

    def mix(name: str, row: Tensor) -> Tensor:
        secret = secrets[name.split("/", 2)[2]]
        return (row.double() @ secret.to(row.device)).to(row.dtype)

    return change_tensors(evidence, mix)


def _random_matrix(width: int, generator: torch.Generator) -> Tensor:
    """Random directions on both sides, and singular values between two bounds."""
    left, right = (
        torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    sizes = _LEAST + (_LARGEST - _LEAST) * torch.rand(width, generator=generator, dtype=torch.float64)
    return left * sizes @ right
