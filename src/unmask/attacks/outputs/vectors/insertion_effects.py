"""How a vector moves when a token is put into a text: a ridge regression on ordinary sentences.

    Δe(put in v) ≈ (ψ(v)·A + e·C)/√n,    ψ(v) = [embedding row of v, vector of the text 'v' alone, 1]

An exchange is a token taken out, which is measured, and another one put in, which is guessed. A derivative at the
present token (HotFlip, GCG) says little of a jump to another word; A averages over insertions in many contexts. What
the regression leaves over has a covariance Σ, and so effects have a likelihood.

Notation: e the vector of the text before, n its tokens afterwards, V the vocabulary, d the width.
Limits: a guess: what it proposes is tested by a forward pass.
Cost: about 30,000 short texts for A, C and Σ, once a model; every token alone for the effects of all tokens.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.run import Progress, silent
from unmask.models.adapter import Model

_RIDGE = 1e-2  # in units of the mean square of a feature
_LONGEST = 20  # tokens of a piece of a sentence
_COMMON = 0.5  # share of insertions whose token is one of the sentences'
_AT_ONCE = {"cpu": 2048, "cuda": 65_536}
_ZIPF = 0.4  # share of Zipf's law in the prior
_LEAST = 1e-13  # of a token that no text should hold


@dataclass(frozen=True)
class FitSettings:
    """Contexts, and tokens put into each."""

    contexts: int = 8_000
    tokens: int = 3


@dataclass(frozen=True)
class Regression:
    """What is fitted: small, whatever the vocabulary. `rows` may be stored beside it, as the vocabulary takes long."""

    features: Float[Tensor, "f d"]  # A
    context: Float[Tensor, "d d"]  # C
    left: Float[Tensor, "d d"]  # Σ
    exchanged: Float[Tensor, "d d"]  # covariance of an exchange of tokens: what another wrong token adds
    rows: Float[Tensor, "vocab d"] | None = None  # ψ(v)·A, where it is known


@dataclass(frozen=True)
class InsertionEffects:
    """Effects of all tokens, and what they leave over."""

    rows: Float[Tensor, "vocab d"]  # ψ(v)·A
    context: Float[Tensor, "d d"]  # C
    left: Float[Tensor, "d d"]  # Σ
    exchanged: Float[Tensor, "d d"]  # covariance of an exchange of tokens: what another wrong token adds
    log_prior: Float[Tensor, " vocab"]

    def to(self, device: torch.device) -> InsertionEffects:
        """The same on another device."""
        return InsertionEffects(**{name: value.to(device) for name, value in vars(self).items()})


@torch.no_grad()
def fit_insertion_effects(
    embedder: Embedder,
    sentences: Sequence[tuple[int, ...]],
    settings: FitSettings = FitSettings(),
    seed: int = 0,
    progress: Progress = silent,
    regression: Regression | None = None,
) -> InsertionEffects:
    """The effects of all tokens, by a regression that is known, or that is fitted here."""
    if regression is None or (rows := regression.rows) is None:
        features = token_features(embedder, progress)
        regression = regression or fit_regression(embedder, features, sentences, settings, seed, progress)
        rows = features @ regression.features
    words = torch.tensor([token for text in sentences for token in text], device=rows.device)
    return InsertionEffects(
        rows=rows,
        context=regression.context,
        left=regression.left,
        exchanged=regression.exchanged,
        log_prior=_log_prior(embedder.model, words),
    )


@torch.no_grad()
def fit_regression(
    embedder: Embedder,
    features: Float[Tensor, "vocab f"],
    sentences: Sequence[tuple[int, ...]],
    settings: FitSettings = FitSettings(),
    seed: int = 0,
    progress: Progress = silent,
) -> Regression:
    """Take one token out of pieces of sentences, and put others into its place; the one that was there is the first."""
    generator = torch.Generator().manual_seed(seed)
    device, vocab_size, num = features.device, len(features), settings.contexts
    draw = lambda *shape: torch.rand(*shape, generator=generator).to(device)  # noqa: E731
    pieces = TextBatch.of(_pieces(sentences, generator), device)
    words = torch.tensor([token for text in sentences for token in text], device=device)
    rows = (draw(num) * len(pieces)).long()
    lengths = pieces.lengths[rows]
    places = (draw(num) * lengths).long()
    put = words[(draw(num, settings.tokens) * len(words)).long()]
    put = torch.where(draw(num, settings.tokens) < _COMMON, put, (draw(num, settings.tokens) * vocab_size).long())
    put[:, 0] = pieces.tokens[rows, places]
    slots = 2 * places[:, None] + 1
    stage = "fitting the effects of tokens"
    before = _embed_all(embedder, pieces.edit(rows, slots, torch.full_like(slots, EMPTY)), stage, progress)
    each = torch.arange(num, device=device).repeat_interleave(settings.tokens)
    after = _embed_all(embedder, pieces.edit(rows[each], slots[each], put.flatten()[:, None]), stage, progress)
    by_length = lengths[each].float().rsqrt()[:, None]
    x, y = torch.cat([features[put.flatten()], before[each]], 1) * by_length, after - before[each]
    coefficients, left = _ridge(x, y)
    exchanges = (y.view(num, settings.tokens, -1)[:, 1:] - y.view(num, settings.tokens, -1)[:, :1]).flatten(0, 1)
    width = features.shape[1]
    exchanged = exchanges.T @ exchanges / len(exchanges)
    return Regression(coefficients[:width], coefficients[width:], left, exchanged)


@torch.no_grad()
def token_features(embedder: Embedder, progress: Progress = silent) -> Float[Tensor, "vocab f"]:
    """ψ(v) of every token."""
    model = embedder.model
    everyone = torch.arange(model.vocab_size, device=model.device)
    words = model.parameter(model.token_embedding).detach()[: model.vocab_size].float()
    alone = _embed_all(embedder, TextBatch(everyone[:, None]), "embedding the vocabulary", progress)
    scaled = [(x - x.mean(0)) / x.std() for x in (words, alone)]
    return torch.cat([*scaled, torch.ones_like(words[:, :1])], 1)


def _embed_all(embedder: Embedder, texts: TextBatch, stage: str, progress: Progress) -> Float[Tensor, "k d"]:
    parts, at_once = [], _AT_ONCE.get(texts.tokens.device.type, 2048)
    for start in range(0, len(texts), at_once):
        progress(stage, start, len(texts))
        parts.append(embedder(texts[slice(start, start + at_once)]))
    return torch.cat(parts)


def _pieces(sentences: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[tuple[int, ...]]:
    """The sentences, and two pieces of each."""
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: E731
    pieces = [text for text in sentences if text]
    for text in list(pieces):
        for _ in range(2):
            size = draw(min(3, len(text)), min(_LONGEST, len(text)))
            start = draw(0, len(text) - size)
            pieces.append(text[start : start + size])
    return pieces


def _ridge(x: Float[Tensor, "k f"], y: Float[Tensor, "k d"]) -> tuple[Float[Tensor, "f d"], Float[Tensor, "d d"]]:
    """Coefficients, and the covariance of what is left."""
    gram = x.T @ x
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    coefficients = torch.linalg.solve(gram, x.T @ y)
    left = y - x @ coefficients
    return coefficients, left.T @ left / len(left)


def _log_prior(model: Model, words: Int[Tensor, " k"]) -> Float[Tensor, " vocab"]:
    """Frequencies of the sentences, and Zipf's law for all that a text may hold, ids being ranks."""
    size = model.vocab_size
    counts = torch.bincount(words, minlength=size).float()
    usual = torch.ones(size, device=words.device)
    usual[sorted(token for token in model.special_tokens if token < size)] = 0
    if model.tokenizer is not None:
        names = model.tokenizer.convert_ids_to_tokens(list(range(size)))
        usual[[token for token, name in enumerate(names) if (name or "[unused").startswith("[unused")]] = 0
    zipf = usual / usual.cumsum(0).clamp_min(1)
    mixed = (1 - _ZIPF) * counts / counts.sum() + _ZIPF * zipf / zipf.sum()
    return mixed.clamp_min(_LEAST).log()
