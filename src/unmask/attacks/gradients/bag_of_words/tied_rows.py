"""The bag of words from an embedding that also predicts tokens: every row moves, but labels the other way.

    row v  =  Σᵢ pᵢ(v)·hᵢ  −  Σ over i with label v of hᵢ  +  (what reading v adds)

of a gradient; a weight delta is minus a sum of such rows, the decay taken out. Without its second and third part,
⟨row, u⟩ ≥ 0 for every u with ⟨hᵢ, u⟩ > 0 for all i. So a row against u is that of a token that occurs.

    u          ← the nearest point to zero of the convex hull of hᵢ/‖hᵢ‖, hᵢ of texts that the model makes itself; of
                 their signs if an adaptive optimiser made the update, which leaves little more than signs of entries
    noise      ← ⟨row, u⟩ must be below zero by more than its error: known of roundings, grids and published noise, else
                 the lower tail of the rows that are no longer than half of all, extended by its last slope
    structure  ← cos(row, u) must be below zero, and below that of all rows that the model's own texts leave of tokens
                 which are no labels; where only few rows are not noise, below a fixed value
    agreement  ← rows that are not noise must be along u as own states are, or nothing is claimed (other weights); then
                 all again, with u half-way to the mean of the update's own rows

Notation: hᵢ what the output layer sees at place i, pᵢ(v) ≥ 0 the probability of v times the slope of the logits.
Limits: the states of the client's texts must share the direction that the model's own texts have, which is seen from
the rows but not proven. Tokens that the model expected as often as they came are missed, and so are tokens that come
late in the minibatches of an adaptive optimiser, after steps that moved their rows along u. Rows that were renumbered
would not be noticed. A padding token that has labels is a token.
Cost: some forward passes over 128 tokens, and vocab·d multiplications.
Source: the identity is the gradient of a softmax; the hull's nearest point by Gilbert, SIAM J. Control 4 (1966).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.attacks.gradients.bag_of_words.noisy_tokens import is_adamw
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.coarse import Coarseness, storage_of, storage_variance
from unmask.models.adapter import Model
from unmask.models.inputs import training_mode, usual_tokens
from unmask.models.model_cache import compute_once
from unmask.progress import tell, track

_EXPECTED_FALSE = 0.005  # by noise, and as many by structure
_NUM_TEXTS, _LENGTH, _NUM_ROUNDS = 8, 16, 4  # of own texts; each round puts one more token of each text in its place
_NUM_STEPS = 1000  # towards the nearest point of the hull: the margin is within 1 % of that after 3,000 (measured)
_TAIL = 5e-3  # of the rows that may be noise: the tail is extended from there
_BEYOND_NOISE = 5.0  # standard deviations of χ² that a row which is not noise is longer
_MOST_AGAINST = 0.05  # share of the clear rows: more are no labels, but another direction
_CLEAR = 25.0  # times the square of its noise: a row whose cosine is its own
_FEW_ROWS = 0.1  # of all: fewer that are clear may be labels for the most part, and show no tail
_ENOUGH_ROWS = 200  # ten of them are below a quantile of 5 %
# Where no tail is seen. Rows of absent tokens reached −0.06 (u the mean of states); −0.21 where training diverged.
_FIXED_COSINE = 0.2
_LEAST_COSINE = 0.02  # below it a sign may be that of bfloat16's rounding
_EPSILON = 1e-8  # Adam's, as every library sets it
_AGREEMENT = 0.5  # of the cosine that own states have
_NOISE_AS_STATED = 1.2  # times what the protocol says, and the noise is another
_UNLIKE = 0.05  # of own states may be against a direction that was found without them


@dataclass(frozen=True)
class TiedTokens:
    """Tokens that occur, the expected number of false ones among them, and measured numbers; if none, the reason."""

    tokens: Int[Tensor, " n"]
    expected_false: float = 0.0
    details: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    is_along: bool = False  # whether most rows are along the direction, so that they show it themselves


@dataclass(frozen=True)
class OwnTexts:
    """Texts that the model makes itself: what the output layer sees of them, and the chances that it gives tokens."""

    states: Float[Tensor, "texts n d"]
    chances: Float[Tensor, "texts n v"]

    def absent_rows(self, text: int) -> Float[Tensor, "v d"]:
        """Rows that one text leaves of tokens which are not its labels, for all tokens."""
        return (self.chances[text].T @ self.states[text].to(self.chances)) / self.states.shape[1]


@dataclass(frozen=True)
class SharedDirection:
    """A unit vector that final states have a part along.

    Of texts that it was not made of: the median cosine of states, and the lowest of rows of tokens that are no labels.
    """

    vector: Float[Tensor, " d"]
    typical_cosine: float
    lowest_cosine: float


@dataclass(frozen=True)
class EmbeddingRows:
    """The rows of an update in the gradient's sign, the variances of their entries, and what decay may have added."""

    values: Float[Tensor, "v d"]
    variance: Float[Tensor, "v d"]
    decay: Float[Tensor, "v d"]
    is_noise_stated: bool

    @cached_property
    def squares(self) -> Float[Tensor, " v"]:
        """Squared norms."""
        return self.values.square().sum(1)

    @cached_property
    def noise_squares(self) -> Float[Tensor, " v"]:
        """What errors that are known add to the squared norms."""
        return self.variance.sum(1)

    def turn_towards(self, direction: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The direction half-way to the mean of the clear rows, each of norm 1."""
        clear = self.values[self.squares > _CLEAR * self.noise_squares]
        return normalize(direction + normalize(normalize(clear, dim=1).mean(0), dim=0), dim=0)


@torch.no_grad()
def find_tied_tokens(evidence: GradientEvidence, model: Model) -> TiedTokens:
    """Tokens whose row of the tied embedding's update points against the direction that all final states share."""
    update = evidence.gradients.get(model.token_embedding)
    if update is None or not bool(update.any()):
        return _nothing(f"the update does not hold '{model.token_embedding}'")
    if not evidence.may_be_tied(model) or not is_tied(model):
        return _nothing(f"'{model.token_embedding}' does not predict tokens")
    is_adaptive = is_adamw(evidence, update)
    shared = compute_once(model, ("tied rows", is_adaptive), lambda: _find_own_direction(model, is_adaptive))
    if shared is None:
        return _nothing("the final states of this model share no direction")
    tell("comparing rows of the embedding with the states of own texts", 0, 1)
    rows = read_rows(evidence, model)
    found = judge_rows(rows, shared, is_adaptive)
    if not found.is_along:
        return found
    # The rows agree: their own mean is nearer to the states of these texts.
    return judge_rows(rows, replace(shared, vector=rows.turn_towards(shared.vector)), is_adaptive)


def _find_own_direction(model: Model, is_adaptive: bool) -> SharedDirection | None:
    return find_shared_direction(write_own_texts(model, torch.Generator().manual_seed(0)), is_adaptive)


def is_tied(model: Model) -> bool:
    """Whether the rows of the token embedding predict tokens, as far as the model can be computed."""
    head = model.token_head if not model.problem else None
    return head is not None and head.embedding is model.parameter(model.token_embedding)


def write_own_texts(model: Model, generator: torch.Generator) -> OwnTexts:
    """Random tokens first; then every token is drawn anew from what the model predicts at its place, several times.

    Every round is kept: a text of random tokens is as much a text as one that the model expects.
    """
    head = model.token_head
    assert head is not None  # `is_tied`
    length = min(_LENGTH, model.max_positions)
    tokens = usual_tokens(model.hf, _NUM_TEXTS * length).view(_NUM_TEXTS, length).to(model.device)
    states, chances = [], []
    with training_mode(model.hf, False):
        for _ in track(range(_NUM_ROUNDS), "writing texts of the model's own"):
            stream = model.hidden_states(tokens)[-1]
            states.append(head.features(stream).detach().double())
            chances.append(head.logits(stream).detach().float().softmax(-1))
            likely = chances[-1].flatten(0, 1).cpu()
            drawn = torch.multinomial(likely, 1, generator=generator).view(_NUM_TEXTS, length).to(tokens)
            tokens = torch.cat([tokens[:, :1], drawn[:, :-1]], 1) if model.causal else drawn
    return OwnTexts(torch.cat(states), torch.cat(chances))


def find_shared_direction(own: OwnTexts, is_adaptive: bool) -> SharedDirection | None:
    """The direction of the widest margin; None if it is not one of other texts' states too.

    Fewer states than dimensions always share a direction. So it is sought among one half of the texts, and must be
    that of the other half; then among all.
    """
    unit = normalize(own.states.sign() if is_adaptive else own.states, dim=-1)
    width = unit.shape[-1]
    half = _nearest_in_hull(unit[::2].reshape(-1, width))
    cosines = unit[1::2].reshape(-1, width) @ half
    if float(cosines.quantile(_UNLIKE)) <= 0:
        return None
    lowest = 0.0
    for text in range(1, len(unit), 2):
        rows = own.absent_rows(text).double()
        rows = rows / (rows.abs() + _EPSILON) if is_adaptive else rows
        lowest = min(lowest, float((rows @ half / rows.norm(dim=1).clamp_min(1e-300)).min()))
    return SharedDirection(_nearest_in_hull(unit.reshape(-1, width)), float(cosines.median()), lowest)


def _nearest_in_hull(points: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """The point of the convex hull that is nearest to zero, with norm 1: at the widest angle to no point."""
    nearest = points.mean(0)
    for _ in range(_NUM_STEPS):
        step = points[(points @ nearest).argmin()] - nearest
        nearest = nearest + (-(nearest @ step) / (step @ step).clamp_min(1e-300)).clamp(0, 1) * step
    return normalize(nearest, dim=0)


def read_rows(evidence: GradientEvidence, model: Model) -> EmbeddingRows:
    """The rows of the embedding's update, without decay where it is known."""
    update = evidence.gradients[model.token_embedding].to(model.device)
    weights = model.parameter(model.token_embedding).detach().double()
    rows, unknown = update.double(), torch.zeros_like(weights[:1])
    if evidence.update is Update.DELTA:
        decay = _known_decay(evidence)
        if decay is None:  # no larger than the smallest change, relative to the weights
            sizes, before = rows.norm(dim=1), weights.norm(dim=1)
            changes = (sizes / before.clamp_min(1e-300))[(sizes > 0) & (before > 0)]
            unknown = weights * (changes.min() if len(changes) else 0.0)
        rows = -(rows + (decay or 0.0) * weights)
    return EmbeddingRows(rows, _variance(evidence, update, weights), unknown, bool(evidence.noise_std))


def _known_decay(evidence: GradientEvidence) -> float | None:
    """The share of itself that every weight loses; None if that is not known."""
    if evidence.weight_decay == 0:
        return 0.0
    if evidence.weight_decay is None or evidence.learning_rate is None or evidence.num_steps is None:
        return None
    return 1 - (1 - evidence.learning_rate * evidence.weight_decay) ** evidence.num_steps


def _variance(evidence: GradientEvidence, update: Tensor, weights: Float[Tensor, "v d"]) -> Float[Tensor, "v d"]:
    """Of each entry's error, as far as something tells it: the protocol, the weights' rounding, coarse values."""
    variance = torch.full_like(weights, (evidence.noise_std or 0.0) ** 2)
    if evidence.update is Update.DELTA:  # each step is rounded to half a unit of the weight's last place at most
        variance += (torch.finfo(update.dtype).eps * weights).square() * ((evidence.num_steps or 1) / 12)
    stored = None if evidence.noise_std else storage_variance(update)
    # Of a small step, entries below the weights' rounding are missing, which looks as if chance had dropped them.
    if stored is not None and (evidence.update is Update.GRADIENT or storage_of(update).kind is not Coarseness.THINNED):
        variance += stored
    return variance


def judge_rows(rows: EmbeddingRows, shared: SharedDirection, is_adaptive: bool) -> TiedTokens:
    """Tokens whose rows are against the shared direction by more than noise and structure explain."""
    num_rows, width = rows.values.shape
    along = rows.values @ shared.vector
    cosines = along / rows.squares.sqrt().clamp_min(1e-300)
    score = -NormalDist().inv_cdf(_EXPECTED_FALSE / num_rows)
    least = score * (rows.variance @ shared.vector.square()).sqrt() + (rows.decay @ shared.vector).abs()
    noise_squares, median = rows.noise_squares, rows.squares.median()
    is_stated = rows.is_noise_stated and bool(median <= _NOISE_AS_STATED * noise_squares.median())
    if not is_adaptive and not is_stated:
        noise_squares = noise_squares.clamp_min(float(median))
    is_signal = rows.squares > noise_squares * (1 + _BEYOND_NOISE * math.sqrt(2 / width))
    if not is_adaptive and not is_stated:
        least = least + _noise_tail(along[~is_signal & (rows.squares > 0)], num_rows)
    clear = cosines[rows.squares > _CLEAR * noise_squares]
    is_seen = len(clear) >= max(_ENOUGH_ROWS, _FEW_ROWS * num_rows)
    if is_seen and not _is_along(clear, shared.typical_cosine):
        return _nothing("the rows of the update are not along the direction that the final states share")
    by_chance = score / math.sqrt(width)  # the cosine of a row that has nothing to do with the direction
    limit = min(-_LEAST_COSINE, shared.lowest_cosine) if is_seen else -max(_FIXED_COSINE, by_chance)
    against = (along < -least) & (cosines < limit)
    tokens = against.nonzero()[:, 0]
    if not len(tokens):
        return _nothing("no row of the embedding is against the direction that the final states share", is_seen)
    signal = (rows.squares - noise_squares)[against].clamp_min(0).sum()
    agreement = float(-along[against].sum() / (len(tokens) * signal).sqrt().clamp_min(1e-300))
    if agreement < _AGREEMENT * shared.typical_cosine:
        return _nothing("the rows that stand out are not along the direction that the final states share", is_seen)
    details = {"tied_rows_agreement": agreement, "tied_rows_cosine_limit": limit}
    return TiedTokens(tokens.cpu(), 2 * _EXPECTED_FALSE, details, is_along=is_seen)


def _is_along(cosines: Float[Tensor, " n"], typical: float) -> bool:
    """Whether rows are along the direction as own states are, but for a few labels."""
    share_against = float((cosines < 0).double().mean())
    return share_against <= _MOST_AGAINST and float(cosines.median()) >= _AGREEMENT * typical


def _noise_tail(along: Float[Tensor, " n"], num_rows: int) -> float:
    """How far below zero noise of an unknown law brings one row in `num_rows`/`_EXPECTED_FALSE`.

    The lower tail of rows that may be noise, from a quantile on that weak labels are too few to change.
    """
    if len(along) < _ENOUGH_ROWS:
        return math.inf if bool((along < 0).any()) else 0.0
    share = max(_TAIL, 10 / len(along))
    near, far = along.quantile(10 * share), along.quantile(share)
    slope = (near - far) / math.log(10)
    return max(0.0, float(slope * math.log(share * num_rows / _EXPECTED_FALSE) - far))


def _nothing(reason: str, is_along: bool = False) -> TiedTokens:
    return TiedTokens(torch.zeros(0, dtype=torch.long), reason=reason, is_along=is_along)
