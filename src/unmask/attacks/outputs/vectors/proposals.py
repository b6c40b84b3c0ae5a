"""Which edits of a text may bring its vector closer to the one seen: the likeliest by the fitted effects.

    score(v) = −d/4·log(1 − cos²(r, Δ)) + log p(v),    cos in the metric P = (Σ + Cov)⁻¹

An insertion begins with the text, an exchange with the text without that token. How long the effect is says little, as
other tokens may be wrong too, so only its direction counts: this is the likelihood of a direction with noise of an
unknown scale around it.

Notation: r the vector seen minus that of the text before v is put in, Δ the effect that is expected, Σ the covariance
of what the regression leaves over, Cov that of an exchange of tokens, d the width; slots as in edits.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.candidate_edits import Edits
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.insertion_effects import InsertionEffects

_RIDGE = 0.05
_SHARE_OF_WIDTH = 0.25  # independent directions by the width, halved: measured where 1 to 5 tokens are wrong
_CELLS = 2**26  # entries of a table of scores


@dataclass(frozen=True)
class ProposalSettings:
    """Tokens tested at each position, in each gap, as the first word, and repetitions of the text's own tokens."""

    exchanges: int = 12
    insertions: int = 8
    first_words: int = 200
    repetitions: int = 60  # divided by the length, three at least
    common: int = 8  # of the most frequent tokens, times the width, where the first edits were in vain


@dataclass
class Proposer:
    """Scores all tokens at all places of texts."""

    effects: InsertionEffects
    settings: ProposalSettings = field(default_factory=ProposalSettings)
    precision: Float[Tensor, "d d"] = field(init=False)
    squares: Float[Tensor, " vocab"] = field(init=False)  # Δᵀ·P·Δ of every row

    def __post_init__(self) -> None:
        covariance = self.effects.left + self.effects.exchanged
        covariance = covariance + _RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        self.precision = torch.linalg.inv(covariance)
        self.squares = ((self.effects.rows @ self.precision) * self.effects.rows).sum(1)

    def __call__(
        self,
        texts: TextBatch,
        seen: Float[Tensor, "c d"],
        vectors: Float[Tensor, "c d"],
        without: Float[Tensor, "c n d"],
        width: int = 1,
        local: Float[Tensor, "c gaps vocab"] | None = None,
    ) -> Edits:
        """Edits of each text, given its vector and those without each of its tokens; `width` times as many as usual.

        `local` is the log prior of tokens in every gap, where a language model gave one.
        """
        num_cells = (texts.tokens.shape[1] + 1) * len(self.effects.log_prior)
        found = []
        for part in torch.arange(len(texts), device=vectors.device).split(max(1, _CELLS // num_cells)):
            some = texts[part]
            here = None if local is None else local[part]
            edits = self._insertions(some, seen[part], vectors[part], width, here)
            if int(some.lengths.max()):
                edits = edits.beside(self._exchanges(some, seen[part], without[part], width, here))
            found.append(edits)
        return found[0].above(*found[1:])

    def _exchanges(self, texts: TextBatch, seen: Tensor, without: Tensor, width: int, local: Tensor | None) -> Edits:
        count = self.settings.exchanges * width
        tokens, mask, (num, length) = texts.tokens.clamp_min(0), texts.mask, texts.tokens.shape
        residuals = (seen[:, None] - without).flatten(0, 1)
        lengths = texts.lengths.clamp_min(1).repeat_interleave(length)
        scores = self.scores(residuals, without.flatten(0, 1), lengths).view(num, length, -1)
        scores += self.effects.log_prior if local is None else local[:, :-1]
        scores.scatter_(2, tokens[..., None], -torch.inf)
        likely = _most(scores, count)
        whole = tokens[:, None, :].expand(-1, length, -1)
        own = scores.gather(2, whole).masked_fill(~mask[:, None, :], -torch.inf)  # its own tokens once more
        best = own.topk(min(length, max(3, self.settings.repetitions // length)), dim=2)
        copies = whole.gather(2, best.indices)
        common = self._common(width).expand(num, length, -1)
        values = torch.cat([likely, copies, common], 2)
        valid = torch.ones_like(values, dtype=torch.bool)
        valid[..., likely.shape[2] : likely.shape[2] + copies.shape[2]] = best.values.isfinite()
        valid &= mask[..., None] & (values != tokens[..., None]) & ~_repeats(values)
        slots = (2 * torch.arange(length, device=tokens.device)[:, None] + 1).expand_as(values)
        return Edits.of_one_slot(slots.flatten(1), values.flatten(1), valid.flatten(1))

    def _insertions(self, texts: TextBatch, seen: Tensor, vectors: Tensor, width: int, local: Tensor | None) -> Edits:
        count = self.settings.insertions * width
        longer, log_prior = texts.lengths + 1, self.effects.log_prior
        scores = self.scores(seen - vectors, vectors, longer)
        if not int(texts.lengths.max()):
            count = self.settings.first_words
        gaps = torch.arange(texts.tokens.shape[1] + 1, device=scores.device)
        anywhere = count if local is None else max(2, count // 4)
        likely = _most(scores + log_prior, anywhere)
        likely = torch.cat([likely, self._common(width).expand(len(likely), -1)], 1)
        shape = len(likely), len(gaps), likely.shape[1]
        slots, values = (2 * gaps)[:, None].expand(shape).flatten(1), likely[:, None, :].expand(shape).flatten(1)
        valid = (gaps < longer[:, None])[..., None] & ~_repeats(likely)[:, None]
        found = Edits.of_one_slot(slots, values, valid.flatten(1))
        if local is None:
            return found
        fits = (scores[:, None] + local).masked_fill((gaps >= longer[:, None])[..., None], -torch.inf)
        fits = fits.flatten(1)
        best = fits.topk(min(count * len(gaps) * 3 // 4, fits.shape[1]), dim=1)
        slots, values = 2 * (best.indices // len(log_prior)), best.indices % len(log_prior)
        repeated = (values[:, :, None] == likely[:, None]).any(2)
        return found.beside(Edits.of_one_slot(slots, values, best.values.isfinite() & ~repeated))

    def _common(self, width: int) -> Int[Tensor, " k"]:
        """The most frequent tokens, where the first edits were in vain: their effects are small and hard to foresee."""
        return _most(self.effects.log_prior, self.settings.common * width if width > 1 else 0)

    def scores(
        self, residuals: Float[Tensor, "k d"], vectors: Float[Tensor, "k d"], lengths: Int[Tensor, " k"]
    ) -> Float[Tensor, "k vocab"]:
        """Log likelihood of every token, put into texts with these vectors, `lengths` with it."""
        rows, by_length = self.effects.rows, lengths.float().rsqrt()[:, None]
        r, base = residuals @ self.precision, vectors @ self.effects.context * by_length
        weighted = base @ self.precision
        along = (r @ rows.T) * by_length + (base * r).sum(1, keepdim=True)
        size = self.squares * by_length.square() + (weighted * base).sum(1, keepdim=True)
        size += 2 * by_length * (weighted @ rows.T)
        size *= (r * residuals).sum(1, keepdim=True)
        cosine = along.clamp_min(0).square_() / size.clamp_min(torch.finfo(size.dtype).tiny)
        return torch.log1p(-cosine.clamp_max(1 - 1e-6)).mul_(-_SHARE_OF_WIDTH * residuals.shape[1])


def _most(scores: Float[Tensor, "*n vocab"], count: int) -> Int[Tensor, "*n k"]:
    """The tokens of the highest scores; all of them where the vocabulary is smaller."""
    return scores.topk(min(count, scores.shape[-1])).indices


def _repeats(values: Int[Tensor, "*n k"]) -> Bool[Tensor, "*n k"]:
    """Whether the same value stands earlier in its row."""
    order = values.argsort(dim=-1, stable=True)
    ordered = values.gather(-1, order)
    same = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    return torch.zeros_like(same).scatter(-1, order, same)
