"""The bag of words from a noisy or coarse update: a test for each token of the vocabulary, not a threshold.

    rows    ← norms of the embedding's rows against the χ² law of the bulk of rows, which no token moved
    span    ← block 0's query, key and value gradients side by side, their noise whitened (`whitening.py`), explained by
              as few vectors of tokens and positions as noise allows (`atoms.py`): a token's gain is χ² without it;
              then again with all positions up to the last one that was seen taken out first
    rivals  ← a token is claimed only if no other one explains its part nearly as well, by the ratio of likelihoods
    decoys  ← for every token two vectors that no text holds, with the vocabulary's mean and covariance. What is no
              token is twice as likely a decoy, so of the tokens that score above the best decoy 1/2 is false on average

The noise is known where the update was rounded, put on a grid or cut (`coarse.py`), where weights were subtracted, or
where the protocol says it; else it is estimated from the spectrum, and again from what the tokens leave.

Notation: σ the noise of an entry; m the number of columns; scores are those of a normal variable.
Limits: tokens + positions < 0.9·d. A token of which noise leaves too little is missed: the bag is not complete. Errors
that are a function of the entry (top-k pruning, a grid coarser than most entries) are no noise: they are taken at their
bound, and weak tokens are lost. Tokens whose vectors nearly agree may be taken for each other.
Cost: 3·vocab·d² multiplications for every doubling of the number of tokens.
Source: decoys as in Elias, Gygi, Nature Methods 4 (2007), and knockoffs, Barber, Candès, arXiv 1404.5609.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.attacks.gradients.bag_of_words.embedding_rows import may_be_decay
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.atoms import Explanation, chi_square_score, explain, rival_gains
from unmask.linalg.coarse import rounding_variance, storage_variance
from unmask.linalg.noise import estimate_noise
from unmask.linalg.whitening import WhitenedGradients, rescale, whiten
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.shapes import Basis

_SCORE = 5.0  # noise exceeds it with a probability of 3e-7, 0.015 times in a vocabulary of 50,000
_CLAIMED = 8.5  # what a token that is too weak to be seen leaves lifts its neighbours to 8 at most (measured)
_CONFUSED = 0.01  # of all batches: a token may be taken for any other of the vocabulary as often as that
_ROW_SCORE = 6.0  # rows are tested by a null of their own bulk, whose tail may be heavier (Laplace)
_LARGEST = 0.125  # of a row's entries: a token's row is long without them too, one that large entries fell into is not
_NUM_DECOYS = 2  # for every token
_LEAST_TOKENS = 6  # were the signal none of tokens, all of the first six would be tokens once in 729 times
_LEAST_UNDER_LOUD = 12  # the same where the noise was taken for louder until tokens explain it: once in 531,441
_ONE_SIGMA = 0.15865525393145707  # share of a normal variable below −1
_VANISHING = 1e-6  # directions below, of vectors of norm 1, are rounding
_MORE_NOISE = 1.5  # times the noise that is known: then it is not that of rounding, and lies on all entries alike
_LEVELS = (30.0, 10.0, 3.0, 2.0, 1.4)  # times the noise that was found
_MANY, _MOST_DECOYS = 64, 0.6  # atoms, and the share of decoys among them: chance alone makes it two thirds
_FEW_DECOYS = 3  # that noise of the right level may let pass: 0.03 on average
_ALIKE = 0.2  # the median entry as a share of the largest: entries of an adaptive optimiser's steps are much alike
_LIKE_WEIGHTS, _MOST_BY_CHANCE = 0.05, 6.0  # cosine with the weights, and in units of chance
_WIDE = 8  # positions in a row that noise may hide


@dataclass(frozen=True)
class NoisyTokens:
    """Tokens that occur, the expected number of false ones among them, and what was measured on the way.

    `noise` and `signal` are root mean squares of an entry of each tensor read; `rank` the number of directions of block
    0's gradients above their noise.
    """

    tokens: Int[Tensor, " n"]
    expected_false: float
    noise: Mapping[str, float]
    signal: Mapping[str, float]
    rank: int
    num_tested: int


@torch.no_grad()
def find_noisy_tokens(evidence: GradientEvidence, model: Model, generator: torch.Generator) -> NoisyTokens:
    """Tokens by rows and by the span; the tokens that rows tell are explained first."""
    moved, row_noise = rows_above_noise(evidence, model)
    gradients = _first_input_gradients(evidence, model)
    noise = {} if row_noise is None else {model.token_embedding: row_noise}
    found, false, rank = moved, len(moved) and model.vocab_size * _tail(_ROW_SCORE), 0
    if gradients and not _hold_weights(evidence, model, list(gradients)):
        white, passed = _from_span(evidence, model, gradients, moved, generator)
        noise |= dict(zip(gradients, white.sigmas, strict=True))
        rank = estimate_noise(white.matrix).rank
        found = torch.unique(torch.cat([moved, passed]))
        false += len(passed) and 1 / _NUM_DECOYS
    signal = {name: _rms_beyond(evidence.gradients[name], sigma) for name, sigma in noise.items()}
    tested = model.vocab_size * (1 + _NUM_DECOYS) if gradients else model.vocab_size
    return NoisyTokens(found.cpu(), float(false), noise, signal, rank, tested)


def rows_above_noise(evidence: GradientEvidence, model: Model) -> tuple[Int[Tensor, " n"], float | None]:
    """Tokens whose embedding row is longer than noise makes rows, and σ; None if rows tell nothing.

    Nearly all rows are noise alone: their median is that of χ² and gives σ; the spread below it, that of their scores.
    Large entries that are scattered over the rows are no tokens: most of the long rows must be long by many entries.
    What lies along a row's own weights may be decay, and is left out.
    """
    update = evidence.gradients.get(model.token_embedding)
    nothing = torch.zeros(0, dtype=torch.long, device=model.device)
    if update is None or evidence.may_be_tied(model):
        return nothing, None
    moved = update.double()
    weights = model.parameter(model.token_embedding).detach().to(moved)
    squares, width = moved.square(), update.shape[1]
    along = (moved * normalize(weights, dim=1)).sum(1).square()
    rest = (squares.sum(1) - along).clamp_min(0.0).masked_fill(may_be_decay(evidence, moved, weights), 0.0)
    is_long, sigma = _longer_than_most(rest, width - 1)
    if sigma == 0.0:
        return nothing, None
    rows = is_long.nonzero()[:, 0].to(model.device)
    if not len(rows):
        return rows, sigma
    num_largest = math.ceil(_LARGEST * width)
    without_largest = squares.sum(1) - squares.topk(num_largest, 1).values.sum(1)
    by_many_entries = _longer_than_most(without_largest, width - num_largest)[0][is_long]
    return (rows, sigma) if float(by_many_entries.double().mean()) > 0.5 else (nothing, sigma)


def _longer_than_most(squares: Float[Tensor, " v"], width: int) -> tuple[Bool[Tensor, " v"], float]:
    """Rows whose squared norm is larger than the bulk of rows makes likely, and σ by the bulk's median."""
    sigma = math.sqrt(max(0.0, float(squares.median())) / (width * (1 - 2 / (9 * width)) ** 3))
    if sigma == 0.0:
        return torch.zeros_like(squares, dtype=torch.bool), sigma
    scores = chi_square_score(squares / sigma**2, width)
    low = float(torch.quantile(scores[:: max(1, len(scores) // 2**20)], _ONE_SIGMA))
    return scores > _ROW_SCORE * max(1.0, -low), sigma


def _first_input_gradients(evidence: GradientEvidence, model: Model) -> dict[str, Float[Tensor, "d m"]]:
    """Block 0's query, key and value gradients as (d, m), by parameter; one that serves all three, once."""
    found = {}
    for role in (Role.QUERY, Role.KEY, Role.VALUE):
        layer, gradient = model.linear(role, 0), evidence.linear(model, role, 0)
        if layer is not None and gradient is not None and not is_adaptive(evidence, gradient):
            whole = evidence.gradients[layer.parameter]
            found[layer.parameter] = whole.T if layer.stored_transposed else whole
    return found


def _hold_weights(evidence: GradientEvidence, model: Model, names: Sequence[str]) -> bool:
    """Whether the weights are in their own gradients, as decay puts them there: they hold tokens of earlier training.

    Told where few tokens reach: behind half of the gradients' directions on either side, noise is like no weights.
    """
    if evidence.update is Update.DELTA and evidence.weight_decay == 0:
        return False
    products, squares, own_squares, count = 0.0, 0.0, 0.0, 0
    for name in names:
        gradient, weights = evidence.gradients[name].double(), model.parameter(name).detach().double()
        U, _, V = torch.linalg.svd(gradient, full_matrices=False)
        left, right = U[:, U.shape[1] // 2 :], V[V.shape[0] // 2 :]
        rest, own = left.T @ gradient @ right.T, left.T @ weights.to(gradient) @ right.T
        products += float((rest * own).sum())
        squares, own_squares = squares + float(rest.square().sum()), own_squares + float(own.square().sum())
        count += rest.numel()
    alike = abs(products) / max(math.sqrt(squares * own_squares), torch.finfo(torch.float64).tiny)
    return alike > max(_LIKE_WEIGHTS, _MOST_BY_CHANCE / math.sqrt(count))


def is_adaptive(evidence: GradientEvidence, delta: Tensor) -> bool:
    """Whether an optimiser such as Adam made a weight delta, which divides every entry by its own size.

    The columns of such a delta are no combinations of inputs. Of a gradient most entries are far below the largest.
    """
    sizes = delta.abs().flatten()
    return evidence.update is Update.DELTA and float(sizes.median()) > _ALIKE * float(sizes.max())


def is_adamw(evidence: GradientEvidence, delta: Tensor) -> bool:
    """The same by what is stated, where the optimiser is."""
    stated = evidence.update is Update.DELTA and evidence.optimizer == "adamw"
    return stated or (evidence.optimizer is None and is_adaptive(evidence, delta))


def _from_span(
    evidence: GradientEvidence,
    model: Model,
    gradients: Mapping[str, Float[Tensor, "d m"]],
    known: Int[Tensor, " k"],
    generator: torch.Generator,
) -> tuple[WhitenedGradients, Int[Tensor, " n"]]:
    """The whitened gradients, and the tokens that explain them better than any decoy.

    Noise that is louder than it was taken for, or not quite white, looks like tokens and decoys without end: then the
    lowest level is sought at which it does not, from above, where little is to be explained.
    """
    flipped = {name for name, gradient in gradients.items() if gradient is not evidence.gradients[name]}
    errors = {name: error_variance(evidence, model, name) for name in gradients}
    variances = [v.T if v is not None and name in flipped else v for name, v in errors.items()]
    white = whiten(list(gradients.values()), variances)
    if white.excess > _MORE_NOISE:
        variances = [None] * len(variances)
        white = whiten(list(gradients.values()))
    is_guessed = all(variance is None for variance in variances)
    dictionary = _dictionary(model, white.row_scale, generator)
    best = _explain(white, dictionary, known.tolist(), is_guessed, model.vocab_size)
    is_noise = _has_decoys(best[1], model.vocab_size)
    least = _LEAST_UNDER_LOUD if is_noise else _LEAST_TOKENS
    for level in _LEVELS if is_noise else ():
        quieter = _explain(white.louder(level), dictionary, known.tolist(), is_guessed, model.vocab_size)
        if _has_decoys(quieter[1], model.vocab_size):
            break
        best = quieter
    white, explanation = best
    rivals = rival_gains(dictionary[0][: model.vocab_size], explanation, white.matrix)
    is_alone = explanation.gains - rivals > 2 * math.log(model.vocab_size / _CONFUSED)
    passing = _above_decoys(explanation, white.matrix.shape[1], model.vocab_size, is_alone.cpu())
    return white, passing[: len(passing) if len(passing) >= least else 0].to(model.device)


def _has_decoys(explanation: Explanation, vocab_size: int) -> bool:
    """Whether noise was explained: room ran out, or more than a few decoys were chosen."""
    return explanation.is_full or sum(atom >= vocab_size for atom in explanation.chosen) > _FEW_DECOYS


def _explain(
    white: WhitenedGradients,
    dictionary: tuple[Tensor, Tensor, Basis],
    known: list[int],
    is_guessed: bool,
    vocab_size: int,
) -> tuple[WhitenedGradients, Explanation]:
    """Tokens and positions that explain the gradients; then tokens alone, with all positions of the texts taken out.

    A noise that was guessed is measured again where nothing is left to explain. It is hopeless once many atoms are
    chosen and most are decoys; before, decoys may stand for tokens that are not chosen yet.
    """
    atoms, places, nuisance = dictionary

    def is_hopeless(chosen: Sequence[int]) -> bool:
        num_decoys = sum(vocab_size <= atom < len(atoms) for atom in chosen)
        return len(chosen) >= _MANY and num_decoys > _MOST_DECOYS * len(chosen)

    first = explain(torch.cat([atoms, places]), white.matrix, nuisance, _SCORE, known, is_hopeless)
    if first.is_full:
        return white, first
    if is_guessed:
        white = rescale(white, first.basis)
    length = _longest([atom - len(atoms) for atom in first.chosen if atom >= len(atoms)])
    nuisance = _orthonormal(torch.cat([nuisance.T, places[:length].double()]))
    start = [atom for atom in first.chosen if atom < len(atoms)]
    return white, explain(atoms, white.matrix, nuisance, _SCORE, start, is_hopeless)


def _longest(positions: list[int]) -> int:
    """The length of the longest text, by positions that were chosen: up to the first wide gap, as texts have none."""
    length = 0
    for position in sorted(positions):
        if position > length + _WIDE:
            break
        length = position + 1
    return length


def error_variance(evidence: GradientEvidence, model: Model, name: str) -> Tensor | None:
    """The variance of each entry's error, where something tells it: the protocol, the weights' rounding, the values."""
    gradient = evidence.gradients[name]
    if evidence.noise_std:
        return torch.full_like(gradient, evidence.noise_std**2, dtype=torch.float64)
    if evidence.update is Update.DELTA:
        return rounding_variance(model.parameter(name).detach(), gradient.dtype) * (evidence.num_steps or 1)
    return storage_variance(gradient)


def _dictionary(
    model: Model, row_scale: Float[Tensor, " d"], generator: torch.Generator
) -> tuple[Float[Tensor, "v d"], Float[Tensor, "p d"], Basis]:
    """Vectors of all tokens, then of decoys; those of positions; and a basis of what every input may hold besides.

    Decoys are normal, with the mean and covariance of the vocabulary. All vectors have norm 1.
    """
    everyone = torch.arange(model.vocab_size, device=model.device)
    words, places, shift = model.first_input_parts(everyone, model.max_positions)
    draws = torch.randn(_NUM_DECOYS * len(words), model.width, generator=generator).to(words)
    variances, axes = torch.linalg.eigh(torch.cov(words.T.double()))
    decoys = words.mean(0) + draws @ (variances.clamp_min(0).sqrt() * axes).T.to(words)
    scale = row_scale.to(words)
    atoms, places = (normalize(rows * scale, dim=1) for rows in (torch.cat([words, decoys]), places))
    always = torch.cat([shift[None], model.token_type_directions]).double() * row_scale
    return atoms, places, _orthonormal(normalize(always, dim=1))


def _orthonormal(rows: Float[Tensor, "k d"]) -> Basis:
    """An orthonormal basis of the rows, which have norm 1 or 0."""
    left, sizes, _ = torch.linalg.svd(rows.T, full_matrices=False)
    return left[:, sizes > _VANISHING]


def _above_decoys(explanation: Explanation, m: int, vocab_size: int, is_alone: Bool[Tensor, " k"]) -> Int[Tensor, " n"]:
    """Chosen tokens that score above the best chosen decoy; none if nothing was explained.

    Tokens below `_CLAIMED`, or that another one could stand for, belong to the explanation but are not claimed.
    """
    chosen = torch.tensor(explanation.chosen, dtype=torch.long)
    scores = chi_square_score(explanation.gains, m).cpu()
    is_decoy = (chosen >= vocab_size) & (chosen < (1 + _NUM_DECOYS) * vocab_size)
    best = max([_CLAIMED, *scores[is_decoy].tolist()])
    passing = chosen[(chosen < vocab_size) & (scores > best) & is_alone]
    return passing[:0] if explanation.is_full else passing


def _tail(score: float) -> float:
    """The probability that a normal variable is above."""
    return math.erfc(score / math.sqrt(2)) / 2


def _rms_beyond(tensor: Tensor, sigma: float) -> float:
    """The root mean square of an entry, less its noise."""
    return math.sqrt(max(0.0, float(tensor.double().square().mean()) - sigma**2))
