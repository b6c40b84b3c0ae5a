"""What TAG and LAMP share: starts in embedding space, Adam on all of them at once, and rounding to tokens.

Every start has a learning rate of its own, so that a grid of rates costs one run. Rates are meant for embeddings whose
entries are about 0.05, BERT's, and are scaled to the model's. Places that are known stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from baselines.gradient_matching import Client
from torch import Tensor

BERT_ENTRY = 0.05
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


def entry_size(client: Client) -> float:
    """Root mean square of the embedding's entries."""
    return float(client.embeddings.square().mean().sqrt())


def random_starts(client: Client, count: int, generator: torch.Generator) -> Tensor:
    """Gaussian embeddings (count, texts, length, d) of the model's own size, with the known places filled in."""
    shape = (count, *client.known.shape, client.model.width)
    return fill_known(client, entry_size(client) * torch.randn(shape, generator=generator).to(client.model.device))


def fill_known(client: Client, x: Tensor) -> Tensor:
    """The same with the embeddings of the frame and the padding in their places."""
    fixed = client.embeddings[client.known.clamp_min(0).to(x.device)]
    return torch.where(client.unknown[..., None], x, fixed)


@dataclass
class Descent:
    """Adam on x (starts, texts, length, d); `rates` (starts,) shrink by `decay` every 50 steps of `num_steps`."""

    client: Client
    x: Tensor
    rates: Tensor
    decay: float

    def __post_init__(self) -> None:
        self.first, self.second = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.num_steps = 0
        self.best_loss = torch.full_like(self.rates, torch.inf)
        self.best = self.x.clone()

    def step(self, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """One step of every start; the losses before it. The best embeddings so far are kept."""
        x = self.x.detach().requires_grad_()
        losses = loss_of(x)
        (slope,) = torch.autograd.grad(losses.sum(), x)
        losses = losses.detach()
        better = losses < self.best_loss
        self.best_loss = torch.where(better, losses, self.best_loss)
        self.best = torch.where(better[:, None, None, None], self.x, self.best)
        slope = torch.nan_to_num(slope) * self.client.unknown[..., None]
        self.num_steps += 1
        self.first = torch.lerp(slope, self.first, _BETAS[0])
        self.second = torch.lerp(slope.square(), self.second, _BETAS[1])
        mean = self.first / (1 - _BETAS[0] ** self.num_steps)
        size = (self.second / (1 - _BETAS[1] ** self.num_steps)).sqrt() + _EPSILON
        rates = self.rates * self.decay ** (self.num_steps // 50)
        self.x = self.x - rates[:, None, None, None] * mean / size
        return losses


def nearest_tokens(client: Client, x: Tensor) -> Tensor:
    """Tokens (starts, texts, length) of the largest cosine; known places keep theirs, special tokens are not taken."""
    embeddings = torch.nn.functional.normalize(client.embeddings, dim=-1)
    scores = torch.nn.functional.normalize(x, dim=-1) @ embeddings.T
    special = [token for token in getattr(client.model.tokenizer, "all_special_ids", ()) if token < len(embeddings)]
    scores[..., special] = -torch.inf
    known = client.known.to(x.device)
    return torch.where(known < 0, scores.argmax(-1), known)


def rounded(client: Client, x: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings of tokens at the length of x's, as LAMP compares them."""
    exact = client.embeddings[tokens]
    return fill_known(client, exact * (x.norm(dim=-1, keepdim=True) / exact.norm(dim=-1, keepdim=True).clamp_min(1e-9)))


def read_texts(client: Client, tokens: Tensor) -> list[tuple[int, ...]]:
    """Texts of a batch (texts, length) at their lengths."""
    return [tuple(row[:length].tolist()) for row, length in zip(tokens, client.lengths, strict=True)]
