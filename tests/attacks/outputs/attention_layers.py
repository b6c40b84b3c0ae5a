"""Random attention layers with their secret, by family of W, and their outputs as evidence."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.evidence.outputs import AttentionEvidence
from unmask.evidence.stacks import AttentionLayer, AttentionStackEvidence
from unmask.linalg.softmax_attention import AttentionMap


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scores_matrix(family: str, d: int, sharpness: float, seed: int) -> Tensor:
    """pd: sym(W) ≻ 0; pdskew: the same with a skew part; gauss: indefinite."""
    A, K = gaussian(seed, d, d), gaussian(seed + 1, d, d)
    if family == "gauss":
        return sharpness * A / d
    W = A @ A.T / d**1.5
    return sharpness * (W + (K - K.T) / d if family == "pdskew" else W)


def random_layer(
    family: str, n: int, d: int, sharpness: float = 1.0, seed: int = 0, *, causal: bool = False, e: int | None = None
) -> tuple[AttentionEvidence, Tensor]:
    """Evidence and the secret X; e columns of V, d unless told."""
    W = scores_matrix(family, d, sharpness, 10 * seed)
    V, X = gaussian(10 * seed + 2, d, e or d) / d**0.5, gaussian(10 * seed + 3, n, d)
    return AttentionEvidence(W, V, AttentionMap(W, causal)(X) @ V, causal), X


def random_stack(
    family: str, n: int, d: int, num_layers: int, sharpness: float = 1.0, seed: int = 0, **about: object
) -> tuple[AttentionStackEvidence, Tensor]:
    """Layers one after the other, with V near a rotation so that sizes stay; e columns of the last V, d unless told."""
    e, causal = int(str(about.get("e", d))), bool(about.get("causal", False))
    layers, X = list[AttentionLayer](), gaussian(1000 * seed + 3, n, d)
    output = X
    for index in range(num_layers):
        at = 1000 * seed + 10 * index
        V = torch.linalg.qr(gaussian(at + 2, d, d)).Q.contiguous()
        if index == num_layers - 1 and e > d:
            V = torch.cat([V, gaussian(at + 4, d, e - d) / d**0.5], dim=1)
        layers.append(AttentionLayer(scores_matrix(family, d, sharpness, at), V, causal))
        output = AttentionMap(layers[-1].W, causal)(output) @ V
    return AttentionStackEvidence(tuple(layers), output), X
