"""One attempt at the text behind a vector: the texts that were embedded, in order of promise, and how it goes.

    key = distance − weight·Σ log p(token)                   by frequencies of tokens alone
    key = distance + weight·(−log p(text) − nats·n)          where a language model reads the most promising ones

Notation: n the tokens of a text; a text is expanded when edits of it are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.edits import TextBatch, concatenate

_USUAL = 12  # tokens
_LANGUAGE_WEIGHT, _LANGUAGE_NATS = 0.002, 8.0  # of frequencies, where a language model has the last word


@dataclass(frozen=True)
class AttemptSettings:
    """How an attempt ranks texts, and when it ends."""

    weight: float = 0.004  # of the prior, by a nat
    nats: float | None = None  # that a token may cost; None: no language model
    texts_at_once: int = 1  # expanded together
    patience: int = 14  # expansions in vain that end it
    widen_after: int = 3  # expansions in vain after which the closest text is expanded again, wider
    widest: int = 16
    pool: int = 2048  # texts that are remembered
    shortlist: int = 64  # texts that a language model reads
    max_texts: int = 12_000  # embedded, of a text of 12 tokens; of longer ones more, by the square
    dropped: float = 0.0  # share of the tokens of an earlier attempt's text that it begins without; 0: the empty text

    @property
    def uses_language(self) -> bool:
        """Whether a language model takes part."""
        return self.nats is not None


@dataclass
class Attempt:
    """The pool of texts for one vector; it begins with the empty text."""

    vector: Float[Tensor, " d"]
    settings: AttemptSettings
    log_prior: Float[Tensor, " vocab"]
    salt: int = 0  # added to the numbers of its texts
    texts: TextBatch = field(init=False)
    distances: Float[Tensor, " pool"] = field(init=False)
    keys: Float[Tensor, " pool"] = field(init=False)
    hashes: Int[Tensor, " pool"] = field(init=False)
    tested: Int[Tensor, " texts"] = field(init=False)  # numbers of all texts that it was given
    widths: dict[int, int] = field(default_factory=dict)  # of expanded texts, by their hashes
    losses: dict[int, float] = field(default_factory=dict)  # −log p of texts that were read, by their hashes
    distance: float = float("inf")
    best_key: float = float("inf")
    promising: tuple[int, ...] | None = None  # the text with that key
    num_texts: int = 0
    num_vain: int = 0
    num_stuck: int = 0

    def __post_init__(self) -> None:
        self.texts = TextBatch(torch.full((1, 1), -1, device=self.vector.device))
        self.distances = self.vector.norm()[None]
        self.keys = self.distances.clone()
        self.hashes = torch.full_like(self.texts.tokens[:, 0], self.salt)
        self.tested = self.hashes

    @property
    def has_ended(self) -> bool:
        """Whether it is stuck, or its budget spent."""
        longer = max(1.0, (int(self.texts[self.distances.argmin()[None]].lengths) / _USUAL) ** 2)
        return self.num_stuck >= self.settings.patience or self.num_texts >= longer * self.settings.max_texts

    def add(self, texts: TextBatch, distances: Float[Tensor, " k"], hashes: Int[Tensor, " k"]) -> None:
        """Different texts that were embedded for the first time."""
        prior = (self.log_prior[texts.tokens.clamp_min(0)] * texts.mask).sum(1)
        if self.settings.uses_language:
            keys = distances - _LANGUAGE_WEIGHT * (prior + _LANGUAGE_NATS * texts.lengths)
        else:
            keys = distances - self.settings.weight * prior
        self.texts = concatenate([self.texts, texts])
        self.distances = torch.cat([self.distances, distances])
        self.keys, self.hashes = torch.cat([self.keys, keys]), torch.cat([self.hashes, hashes])
        self.tested = torch.cat([self.tested, hashes])
        if len(self.keys) > 2 * self.settings.pool:
            near = self.keys.topk(self.settings.pool, largest=False).indices
            close = self.distances.topk(self.settings.shortlist, largest=False).indices
            kept = torch.cat([near, close]).unique()
            self.texts, self.distances = self.texts[kept], self.distances[kept]
            self.keys, self.hashes = self.keys[kept], self.hashes[kept]

    def unread(self) -> Int[Tensor, " rows"]:
        """Promising texts that the language model has not read yet."""
        rows = self._shortlist().tolist()
        hashes = self.hashes[rows].tolist()
        return self.hashes.new_tensor([row for row, h in zip(rows, hashes, strict=True) if h not in self.losses])

    def read(self, losses: Mapping[int, float]) -> None:
        """What a language model says of texts, by their hashes."""
        self.losses.update(losses)

    def _shortlist(self) -> Int[Tensor, " rows"]:
        near = self.keys.topk(min(self.settings.shortlist, len(self.keys)), largest=False).indices
        close = self.distances.topk(min(self.settings.shortlist // 4, len(self.keys)), largest=False).indices
        return torch.cat([near, close]).unique()

    def choose(self) -> list[tuple[int, int]]:
        """Rows of the pool to expand, and how wide each."""
        settings = self.settings
        order = self._order()
        hashes = self.hashes[order].tolist()
        chosen = [(row, 1) for row, h in zip(order, hashes, strict=True) if h not in self.widths]
        chosen = chosen[: settings.texts_at_once]
        closest = int(self.distances.argmin())
        width = self.widths.get(int(self.hashes[closest]), 0)
        if self.num_vain >= settings.widen_after and 0 < width < settings.widest:
            chosen = [(closest, 4 * width), *chosen[: settings.texts_at_once - 1]]
            self.num_vain = -1
        for row, width in chosen:
            self.widths[int(self.hashes[row])] = width
        return chosen

    def is_empty(self, row: int) -> bool:
        """Whether that text of the pool has no token."""
        return int(self.hashes[row]) == self.salt

    def _order(self) -> list[int]:
        """Rows of the pool, the most promising first."""
        if not self.settings.uses_language:
            return self.keys.topk(min(len(self.keys), len(self.widths) + 64), largest=False).indices.tolist()
        rows = self._shortlist()
        losses = self.vector.new_tensor([self.losses[h] for h in self.hashes[rows].tolist()])
        nats = self.settings.nats or 0.0
        keys = self.distances[rows] + self.settings.weight * (losses - nats * self.texts[rows].lengths)
        if float(keys.min()) < self.best_key - 1e-6:
            self.best_key, self.num_vain, self.num_stuck = float(keys.min()), 0, 0
            self.promising = self.texts[rows[keys.argmin()][None]].as_tuples()[0]
        return rows[keys.argsort()].tolist()

    def note_closest(self, distance: float) -> None:
        """The exact distance of the closest text after an expansion."""
        self.num_vain, self.num_stuck = self.num_vain + 1, self.num_stuck + 1
        if distance < self.distance:
            self.distance, self.num_vain, self.num_stuck = distance, 0, 0
