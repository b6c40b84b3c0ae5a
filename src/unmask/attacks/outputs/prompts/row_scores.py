"""How likely every token is in each row that was seen, before any of them is tested.

    score(v) = κ·log N(row; table of the layer seen) + log( (1 − ε)·p(v) + ε/V )

p is what the model itself predicts. Where a stream is seen, the blocks behind it predict every next token at once, and
the scores of some rows are made together and kept until they are read: the vocabulary's table, which is larger than
all weights that a candidate goes through, is then read once for all of them. A cache predicts one token ahead.

Notation: κ as in ranking.py, V the vocabulary, ε = 0.1 the share of what the model does not expect.
Cost: 2·V·d flops a row for the table, as many for the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.outputs.prompts.ranking import Metric, direct_metric, leading_directions, posterior
from unmask.attacks.outputs.prompts.seen_text import ScoredRows, SeenText, TextProgress
from unmask.attacks.outputs.prompts.templates import Templates
from unmask.models.adapter import Model
from unmask.models.readouts import FINAL_NORM, Readout

_SURPRISE = 0.1
_KEPT = 2**20  # scores that are kept of a text


@dataclass(frozen=True)
class RowScores:
    """Everything that scores are made of, for all texts."""

    model: Model
    layer: int
    readout: Readout
    templates: Templates

    @cached_property
    def metric(self) -> Metric:
        """States of the layer seen, whitened."""
        return direct_metric(self.templates.in_context.seen)

    @cached_property
    def first_metric(self) -> Metric:
        """The same for a text's first token."""
        return direct_metric(self.templates.alone.seen)

    @cached_property
    def leading(self) -> Float[Tensor, "r m"] | None:
        """Directions of what is seen that tell most about the token."""
        return leading_directions(self.metric)

    def metric_at(self, text: TextProgress) -> Metric:
        """The table of the next row: a text's first token has one of its own."""
        return self.metric if text.continuation.num_known else self.first_metric

    def __call__(self, text: TextProgress, where: slice) -> ScoredRows:
        """Every token in some rows, from the next one on: rows that were kept, or new ones."""
        if not self.readout.is_stream or text.continuation.num_known == 0:
            return self._score(text, where)
        kept = text.scored
        if kept is None or where.start < kept.first or where.stop > kept.first + len(kept.scores):
            stop = min(len(text.seen), max(where.stop, where.start + _KEPT // self.model.vocab_size))
            kept = text.scored = self._score(text, slice(where.start, stop))
        part = slice(where.start - kept.first, where.stop - kept.first)
        return ScoredRows(where.start, kept.prior[part], kept.scores[part])

    def _score(self, text: TextProgress, where: slice) -> ScoredRows:
        prior = self._log_prior(text, where)
        scores = self.metric_at(text).score_rows(text.seen.aligned[where])
        return ScoredRows(where.start, prior, posterior(scores, prior))

    def _log_prior(self, text: TextProgress, where: slice) -> Float[Tensor, "k vocab"]:
        size, device = self.model.vocab_size, text.seen.stored.device
        even = torch.full((where.stop - where.start, size), _SURPRISE / size, device=device)
        unembedding = self.model.unembedding
        if text.features is None or unembedding is None:
            return even.log()
        known = text.is_predicted[where]
        said = (text.features[where][known] @ unembedding[:size].T).softmax(-1)
        even[known, : said.shape[1]] += (1 - _SURPRISE) * said.to(even)
        return even.log()

    def predictions(self, seen: SeenText) -> tuple[Float[Tensor, "n d"] | None, Bool[Tensor, " n"]]:
        """What the output layer reads before each row, as far as the states themselves tell."""
        length, device = len(seen), seen.stored.device
        is_predicted = torch.zeros(length, dtype=torch.bool, device=device)
        if self.model.unembedding is None:
            return None, is_predicted
        if not self.readout.is_stream:
            return seen.stored.new_zeros(length, self.model.final_width), is_predicted
        x, positions = seen.stored[None], seen.position + torch.arange(length, device=device)[None]
        mask = torch.ones_like(positions, dtype=torch.bool)
        for block in range(self.layer, self.model.num_blocks):
            x = self.model.block_forward(block, x, positions, mask)
        rows = x[0] if self.readout == FINAL_NORM else self.model.final_norm(x[0])
        is_predicted[1:] = True
        return rows.roll(1, 0), is_predicted
