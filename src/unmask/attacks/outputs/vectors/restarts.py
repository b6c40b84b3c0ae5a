"""Where a new attempt begins: a text that an earlier one ended with, without its doubtful tokens.

A search that is stuck has most of the words and some wrong ones that fit together. Without a part of them it finds its
way out: the tokens that bring the vector least and that a language model expects least go first, by chance, or a whole
piece of the text does.

Limits: a search by chance; an attempt may end where the last one did.
Source: iterated local search (Lourenço, Martin, Stützle 2003), with doubts of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.candidate_edits import deletions
from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch, squeeze
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.language_prior import LanguagePrior

_PIECE = 0.35  # share of restarts that lose one piece
_NUM_ENDS = 4  # best ends among which a restart chooses
_NUM_VOTERS = 8
_BEST = 0.6  # share of restarts from the best end


@dataclass
class Ends:
    """Texts that attempts ended with: by distance, and by the key of a language model's attempts."""

    by_distance: dict[tuple[int, ...], float] = field(default_factory=dict)
    by_key: dict[tuple[int, ...], float] = field(default_factory=dict)

    def choose(self, generator: torch.Generator) -> tuple[int, ...]:
        """One of the best, () if there is none."""
        ranked = self.by_key if self.by_key and _draw(generator) < 0.5 else self.by_distance
        best = sorted(ranked, key=lambda text: ranked[text])[:_NUM_ENDS]
        if not best:
            return ()
        return best[0] if _draw(generator) < _BEST else best[int(_draw(generator) * len(best))]

    def votes(self, text: tuple[int, ...]) -> list[float]:
        """The share of other good ends that hold each token of a text."""
        best = sorted(self.by_distance, key=lambda end: self.by_distance[end])[:_NUM_VOTERS]
        others = [set(end) for end in best if end != text]
        return [sum(token in other for other in others) / max(1, len(others)) for token in text]


def drop_doubtful(
    text: tuple[int, ...],
    vector: Float[Tensor, " d"],
    share: float,
    votes: Sequence[float],
    embedder: Embedder,
    language: LanguagePrior | None,
    generator: torch.Generator,
) -> TextBatch:
    """The text without some of its tokens, half of `share` to one and a half of it."""
    whole = TextBatch.of([text], vector.device)
    count = min(len(text) - 1, max(1, round(len(text) * share * (0.5 + _draw(generator)))))
    if _draw(generator) < _PIECE:
        first = int(_draw(generator) * (len(text) - count + 1))
        lost = torch.arange(first, first + count)
    else:
        gumbel = -(-torch.rand(len(text), generator=generator).clamp(1e-9, 1 - 1e-7).log()).log()
        doubts = doubt_tokens(whole, vector, embedder, language).cpu() - _standard(torch.tensor(votes))
        lost = (gumbel + doubts).topk(count).indices
    return without(whole, lost)


def doubt_tokens(
    text: TextBatch, vector: Float[Tensor, " d"], embedder: Embedder, language: LanguagePrior | None
) -> Float[Tensor, " n"]:
    """How doubtful each token of one text is, in standard deviations: it brings little, and is not expected."""
    every, removed = text.tokens.shape[1], deletions(text)
    rows = torch.zeros(every, dtype=torch.long, device=vector.device)
    shorter = text.edit(rows, removed.slots[0], removed.values[0])
    doubts = -_standard((vector - embedder(shorter)).norm(dim=1))
    return doubts if language is None else doubts + _standard(language.token_losses(text)[0])


def without(text: TextBatch, places: Int[Tensor, " k"]) -> TextBatch:
    """One text without the tokens at some places."""
    kept = text.tokens.clone()
    kept[0, places.to(kept.device)] = EMPTY
    return squeeze(kept)


def _standard(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return (values - values.mean()) / values.std().clamp_min(1e-9)


def _draw(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
