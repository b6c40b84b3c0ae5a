"""What TAG and LAMP share: starts in embedding space, Adam on all of them at once, and rounding to tokens.

Every start has a learning rate of its own, so that a grid of rates costs one run. Rates are meant for embeddings whose
entries are about 0.05, BERT's, and are scaled to the model's. Places that are known stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from baselines.gradient_matching import Client
from torch import Tensor

BERT_ENTRY = 0.05
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_STEPS_BEFORE_CAPTURE = 3  # libraries allocate and choose their kernels in the first calls


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


class Descent:
    """Adam on x (starts, texts, length, d); `rates` (starts,) shrink by `decay` every 50 steps.

    On a GPU a step is thousands of small kernels, so that launching them takes ten times as long as they do: after a
    few steps one is captured as a graph, and the others replay it. So `loss_of` must read what it needs in place.
    """

    def __init__(
        self, client: Client, start: Tensor, rates: Tensor, decay: float, loss_of: Callable[[Tensor], Tensor]
    ) -> None:
        self.client, self.rates, self.decay, self.loss_of = client, rates, decay, loss_of
        self.x, self.best = start.clone(), start.clone()
        self.first, self.second = torch.zeros_like(start), torch.zeros_like(start)
        self.losses, self.best_loss = torch.full_like(rates, torch.inf), torch.full_like(rates, torch.inf)
        self.age = torch.zeros((), device=start.device)  # steps that were made
        self.num_steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> Tensor:
        """One step of every start; the losses before it. The best embeddings so far are kept."""
        if self.x.is_cuda and self.num_steps == _STEPS_BEFORE_CAPTURE:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._update()
        self.num_steps += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.x.is_cuda:
            with _side_stream(self.x.device):  # autograd must have seen the stream that it is captured on
                self._update()
        else:
            self._update()
        return self.losses.clone()

    def _update(self) -> None:
        x = self.x.detach().clone().requires_grad_()
        losses = self.loss_of(x)
        (slope,) = torch.autograd.grad(losses.sum(), x)
        self.losses.copy_(losses.detach())
        better = self.losses < self.best_loss
        self.best_loss.copy_(torch.where(better, self.losses, self.best_loss))
        self.best.copy_(torch.where(better[:, None, None, None], self.x, self.best))
        slope = torch.nan_to_num(slope) * self.client.unknown[..., None]
        rates = self.rates * self.decay ** ((self.age + 1) / 50).floor()
        self.age += 1
        self.first.lerp_(slope, 1 - _BETAS[0])
        self.second.lerp_(slope.square(), 1 - _BETAS[1])
        mean = self.first / (1 - _BETAS[0] ** self.age)
        size = (self.second / (1 - _BETAS[1] ** self.age)).sqrt() + _EPSILON
        self.x -= rates[:, None, None, None] * mean / size


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


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
