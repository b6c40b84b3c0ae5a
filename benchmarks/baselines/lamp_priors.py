"""Language models that LAMP weighs its orders of words with: nats a token of a text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from unmask.models import Model


class Prior(Protocol):
    """Scores texts; smaller is more likely."""

    name: str

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Mean negative log-probability of a token, for each text."""
        ...


class ModelPrior:
    """A causal language model; texts of another tokenizer are decoded first."""

    def __init__(self, model: Model, decode: Callable[[Sequence[int]], str] | None = None, name: str = "") -> None:
        self.model, self.decode, self.name = model, decode, name or "a language model"

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """All texts in one forward pass; the first token is not predicted."""
        if self.decode is not None:
            texts = [self.model.encode(self.decode(text)) for text in texts]
        texts = [text if len(text) > 1 else [*text, 0, 0][:2] for text in texts]
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.model.device)
        scored = torch.arange(1, longest, device=tokens.device) < torch.tensor(
            list(map(len, texts)), device=tokens.device
        ).unsqueeze(1)
        logits = self.model.hf(input_ids=tokens).logits[:, :-1].float()
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return ((losses.view(scored.shape) * scored).sum(1) / scored.sum(1)).tolist()


class BigramPrior:
    """Pairs of tokens counted in texts of the same kind, mixed with single ones: what fits on any machine.

    p(w | u) = 0.7·c(u, w)/c(u) + 0.25·c(w)/N + 0.05/V
    """

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        self.singles: Counter[int] = Counter()
        self.pairs: Counter[tuple[int, int]] = Counter()
        for text in texts:
            self.singles.update(text)
            self.pairs.update(itertools.pairwise(text))
        self.total, self.vocab_size = max(1, self.singles.total()), vocab_size
        self.name = f"bigrams of {self.total:,} tokens of the same set, the batch left out"

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Mean over the pairs of each text."""
        return [sum(map(self._nats, text, text[1:])) / max(1, len(text) - 1) for text in texts]

    def _nats(self, before: int, token: int) -> float:
        seen = self.singles[before]
        pair = self.pairs[before, token] / seen if seen else 0.0
        return -math.log(0.7 * pair + 0.25 * self.singles[token] / self.total + 0.05 / self.vocab_size)
