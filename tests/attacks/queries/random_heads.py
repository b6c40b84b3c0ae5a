"""Random heads, and oracles that answer for them: exact, in another precision, noisy, rounded, by signs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights


def random_head(width: int, seed: int = 0, rank: int | None = None, num_heads: int = 1) -> HeadWeights:
    """Gaussian weights of the usual size: |W y| is about 1 for a unit y, |v| about 1."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_heads, *shape, generator=generator, dtype=torch.float64)

    W = normal(width, width) if rank is None else normal(width, rank) @ normal(rank, width) / rank**0.5
    return HeadWeights(W=W / width**0.5, v=normal(width) / width**0.5)


def oracle_of(
    heads: HeadWeights,
    after: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    budget: int | None = None,
    max_norm: float | None = None,
) -> OracleEvidence:
    """The layer in an arithmetic of `dtype`, with `after` applied to its answers; tokens beyond `max_norm` refused."""
    inside = HeadWeights(W=heads.W.to(dtype), v=heads.v.to(dtype))

    def answer(sequences: Tensor) -> Tensor:
        assert max_norm is None or float(sequences.norm(dim=2).max()) <= max_norm * (1 + 1e-12), "a token is too long"
        answers = inside(sequences.to(dtype)).double()
        return answers if after is None else after(answers)

    return OracleEvidence(FunctionOracle(answer), heads.v.shape[1], Ledger(budget=budget), max_norm)


def added(deviation: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Noise that is new for every answer."""
    generator = torch.Generator().manual_seed(seed)
    return lambda answers: answers + deviation * torch.randn(answers.shape, generator=generator, dtype=torch.float64)


def repeating(largest: float) -> Callable[[Tensor], Tensor]:
    """Errors of `largest` at most that are the same for the same answer: a hash of it."""

    def error(answer: Tensor) -> float:
        drawn = hashlib.blake2b(answer.double().numpy().tobytes(), digest_size=8).digest()
        return largest * (int.from_bytes(drawn, "little") / 2**63 - 1)

    return lambda answers: answers + torch.tensor([error(answer) for answer in answers], dtype=torch.float64)


def rounded(decimals: int) -> Callable[[Tensor], Tensor]:
    """Answers to some decimals."""
    return lambda answers: answers.round(decimals=decimals)
