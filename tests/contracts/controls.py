"""Evidence whose signal was destroyed: tensors that say nothing, and oracles without a law."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

LOW_RANK = 12  # about as many as a small batch has tokens


def noise_of_the_same_norm(tensors: Tensors, seed: int) -> dict[str, Tensor]:
    """Gaussian noise in the place of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _scale(_normal(tensor, generator), tensor) for name, tensor in tensors.items()}


def noise_of_a_low_rank(tensors: Tensors, seed: int) -> dict[str, Tensor]:
    """Passes every test of the spectrum: a span of few directions, none of which belongs to a token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        if tensor.ndim != 2:
            return _normal(tensor, generator)
        left = torch.randn(tensor.shape[0], LOW_RANK, generator=generator, dtype=tensor.dtype)
        return left @ torch.randn(LOW_RANK, tensor.shape[1], generator=generator, dtype=tensor.dtype)

    return {name: _scale(noise(tensor), tensor) for name, tensor in tensors.items()}


def shuffle_entries(tensors: Tensors, seed: int) -> dict[str, Tensor]:
    """Every entry of a tensor at another place of it."""
    generator = torch.Generator().manual_seed(seed)
    orders = {name: torch.randperm(tensor.numel(), generator=generator) for name, tensor in tensors.items()}
    return {name: tensor.flatten()[orders[name]].reshape(tensor.shape) for name, tensor in tensors.items()}


def answer_by_chance(sizes: Tensor) -> Callable[[list[bytes]], Tensor]:
    """New Gaussian numbers of these sizes for every question."""
    generator = torch.Generator().manual_seed(3)
    return lambda keys: sizes * torch.randn(len(keys), *sizes.shape, generator=generator, dtype=torch.float64)


def answer_by_hash(sizes: Tensor) -> Callable[[list[bytes]], Tensor]:
    """The same answer to the same question, and no law."""

    def draw(keys: list[bytes]) -> Iterator[Tensor]:
        for key in keys:
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
            yield sizes * torch.randn(sizes.shape, generator=generator, dtype=torch.float64)

    return lambda keys: torch.stack(list(draw(keys)))


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _scale(noise: Tensor, like: Tensor) -> Tensor:
    return noise * (like.norm() / noise.norm())
