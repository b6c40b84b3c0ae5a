"""Random attention layers and their outputs, by family of W; the score matrix decides how hard they are."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap

FAMILIES = ("pd", "pdskew", "gauss")


def random_layer(
    family: str, n: int, d: int, sharpness: float, seed: int, *, causal: bool = False
) -> tuple[AttentionEvidence, Tensor]:
    """What the adversary sees of a layer, and the input.

    pd: W = s·AAᵀ/d^1.5; pdskew: the same + s·(K − Kᵀ)/d; gauss: W = s·G/d; inputs are standard normal.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A = draw(d, d)
    W = A / d if family == "gauss" else A @ A.T / d**1.5
    if family == "pdskew":
        K = draw(d, d)
        W = W + (K - K.T) / d
    W, V, X = sharpness * W, draw(d, d) / d**0.5, draw(n, d)
    return AttentionEvidence(W, V, AttentionMap(W, causal)(X) @ V, causal), X
