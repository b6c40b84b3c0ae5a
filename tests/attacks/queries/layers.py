"""Layers of several heads, in general position and otherwise, and the parts that a learner would have made of them."""

from __future__ import annotations

import torch
from tests.attacks.queries.random_heads import oracle_of, random_head
from tests.attacks.queries.random_networks import normal
from torch import Tensor

from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.resolution import Resolution
from unmask.linalg.heads import HeadWeights

EXACT = Resolution(1.1e-16)  # float64
SINGLE = Resolution(6e-8)  # float32


def joined(*layers: HeadWeights) -> HeadWeights:
    """All heads of several layers."""
    return HeadWeights(W=torch.cat([heads.W for heads in layers]), v=torch.cat([heads.v for heads in layers]))


def one(W: Tensor, v: Tensor) -> HeadWeights:
    """A layer of one head."""
    return HeadWeights(W=W[None], v=v[None])


def vector_layer(num_heads: int, width: int, num_outputs: int, seed: int = 0) -> HeadWeights:
    """Heads whose values are vectors."""
    v = normal(2000 + seed)(num_heads, width, num_outputs) / width**0.5
    return HeadWeights(W=random_head(width, seed, num_heads=num_heads).W, v=v)


def pairs_of(heads: HeadWeights, boost: float = 1.0, max_norm: float = torch.inf, **options) -> Pairs:
    """The layer, asked in pairs; Σ v is known exactly."""
    evidence = oracle_of(heads, max_norm=None if max_norm == torch.inf else max_norm, **options)
    return Pairs(evidence, heads.v.sum(0), boost, max_norm)


def two_token_signal(heads: HeadWeights, U: Tensor, y: Tensor) -> Tensor:
    """Σ_h (v_hᵀu)·σ(uᵀW_h y), as it stands in the paper."""
    return torch.einsum("hd,bd,bh->b", heads.v, U, torch.einsum("bd,hde,e->bh", U, heads.W, y).sigmoid())


def asking_token(width: int, seed: int = 0) -> Tensor:
    """A random y as the learner draws it: of length one, with half of it in the first entry."""
    aside = normal(3000 + seed)(width)
    aside[0] = 0
    unit = torch.eye(1, width, dtype=torch.float64)[0]
    return (unit + aside / aside.norm()) / 2**0.5


def isolation_of(heads: HeadWeights, y: Tensor, resolution: Resolution = EXACT) -> Isolation:
    """The true heads at y, one a unit."""
    return Isolation.at(Units.single(heads.v), heads.W @ y, resolution)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
