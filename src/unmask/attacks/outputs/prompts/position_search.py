"""The token at one position, given the tokens before it: few candidates, each tested by its own state.

    1. test the likeliest tokens by the table of the layer that was seen: a few, then some tens
    2. linearise at the closest one so far, rank the likelier tokens through that map, test the likeliest
    3. again from there, with the whole vocabulary, and then with its likelier tokens; where the closest stays the
       same, further down the order, in growing batches, to the last token

A candidate is accepted when its recomputed state agrees with the one seen as far as rounding lets it; then its distance
is decades below all others. Where none agrees, noise may have been added: then the closest candidate is accepted if
what it leaves is white (proof/whiteness.py) and if it beats its neighbours, which were tested too, by likelihood. If
that is no token's difference, but no noise either, the candidate is taken without proof. In a text's first position,
where states are long and close to each other, noise and coarse rounding must beat the whole vocabulary; and once a
position of a text has agreed, noise is excluded in it.

Notation: distance = ‖h(v) − h‖/‖h‖.
Limits: finds the token if the table's order is good or if the budget is the whole vocabulary; never accepts another one
unless noise hides the difference.
Cost: candidates are counted, and so are Jacobians (each is worth about d/2 candidates, or d/8 of leading directions).
Source: SipIt (arXiv 2510.15511) tests candidates in the order of a gradient's guess; the order here is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation, Trial
from unmask.attacks.outputs.prompts.ranking import LocalMap, linearised_scores, posterior
from unmask.attacks.outputs.prompts.side_by_side import Reading, RowPass
from unmask.attacks.outputs.prompts.templates import Templates, TokenStates
from unmask.progress import tell_detail
from unmask.proof.state_noise import lengths_of
from unmask.proof.whiteness import Whiteness, WhitenessTest

CLEAR = 12.0  # e¹² against the runner-up: a whole vocabulary of chances leaves fewer than one in three
LOUDEST = 0.2  # noise of more than this share of a state's norm: nothing is claimed, as not all tokens are tested
_GROWTH = 4
_APART = 10.0  # a token that agrees so much better than another one is told from it
_FLOOR = 0.01  # of the tolerance: what rounding leaves of a zero
LARGEST_BATCH = 2048
_LIKELY = 4096  # tokens that are ranked through a linear map, but for the second, which ranks all


@dataclass(frozen=True)
class Observation:
    """What is seen at a position: the state, the noise in it, and how far a true candidate's state may be off.

    `state` has its `weights` on it (readouts.py); a candidate's state gets them where it is compared.
    """

    state: Float[Tensor, " m"]
    weights: Float[Tensor, " m"]
    tolerance: float  # on the relative distance
    usual: float  # the same: the right candidate's is not larger as a rule, so that others are tested beside one beyond
    noise_variance: float  # of a coordinate
    confirm: bool  # rounding is so strong that the runner-up must be beaten by likelihood
    against_all: bool  # and with it every other token of the vocabulary
    noisy: bool | None  # whether noise was established at earlier positions of the text; None: there are none
    widths: tuple[int, ...] = ()  # of the parts of the state, where it has some
    unevenness: float = 1.0  # of the rounding (state_noise.py)

    def distances(self, states: Float[Tensor, "k m"]) -> Float[Tensor, " k"]:
        """How far candidates' states are from the one seen, by its norm."""
        return (states * self.weights - self.state).norm(dim=1) / lengths_of(self.state)

    def leaves_open(self, distance: float, others: Float[Tensor, " k"], noise: float) -> Bool[Tensor, " k"]:
        """Tell which tokens one at a distance does not exclude: with noise by likelihood, else by a tenth of theirs.

        What a token leaves is noise too, as rounding to a random neighbour is louder than to the nearest one.
        """
        if noise > 0:
            gains = (others.double().square() - distance**2) * len(self.state) / (2 * max(noise, distance) ** 2)
            return gains < CLEAR * self.unevenness
        return others <= min(self.tolerance, max(_APART * distance, _FLOOR * self.tolerance))

    @property
    def rounding(self) -> float:
        """The length of the rounding by the state's."""
        return (self.noise_variance * len(self.state)) ** 0.5 / float(lengths_of(self.state))

    def reach(self, distance: float, noise: float) -> float:
        """Tell how far from a token's state those lie that a likelihood leaves open; by its norm.

        Wrong tokens that agree have the right one at √(distance² − rounding²), as that leaves no more than rounding.
        Expected states are off, so it is twice as much.
        """
        open_to = (2 * CLEAR * self.unevenness / len(self.state)) ** 0.5 * max(noise, distance)
        return 2 * (open_to + max(0.0, distance**2 - self.rounding**2) ** 0.5)


@dataclass(frozen=True)
class SearchSettings:
    """How many candidates are tested at a time, and at most."""

    first: int = 8
    refined: int = 16
    max_linearisations: int = 8
    max_candidates: int | None = None  # None: the whole vocabulary
    second: int = 56  # before the first linearisation, which costs as much as some hundred candidates


@dataclass
class TestedTokens:
    """What is kept of the candidates that were tested at a position: all distances, and the closest one whole."""

    tokens: Int[Tensor, " k"]
    distances: Float[Tensor, " k"]
    offsets: Float[Tensor, " d"]  # sum of what streams in the middle have beyond their expectation
    best: Trial | None = None
    num_jacobians: int = 0

    @classmethod
    def none(cls, like: Float[Tensor, " d"]) -> TestedTokens:
        """Nothing was tested yet; `like` a stream in the middle."""
        return cls(torch.zeros(0, dtype=torch.long, device=like.device), like.new_zeros(0), torch.zeros_like(like))

    def add(self, trial: Trial, distances: Float[Tensor, " k"], offsets: Float[Tensor, " d"]) -> None:
        """Further candidates."""
        if self.best is None or float(distances.min()) < self.distance:
            self.best = trial.only(int(distances.argmin()))
        self.tokens = torch.cat([self.tokens, trial.tokens])
        self.distances = torch.cat([self.distances, distances])
        self.offsets = self.offsets + offsets

    @property
    def token(self) -> int:
        """The closest candidate."""
        assert self.best is not None
        return int(self.best.tokens[0])

    @property
    def distance(self) -> float:
        """How close it is."""
        return float(self.distances.min())

    def runner_up(self, equal: Mapping[int, tuple[int, ...]]) -> float:
        """The smallest distance of a token that is not of the closest one's class; infinite where there is none."""
        own = torch.tensor(equal.get(self.token, (self.token,)), device=self.tokens.device)
        others = self.distances[~torch.isin(self.tokens, own)]
        return float(others.min()) if len(others) else float("inf")

    def __len__(self) -> int:
        return len(self.tokens)


class TokenStatus(Enum):
    """What is known of the closest candidate."""

    AGREES = "Its state is the one seen, up to rounding."
    WHITE = "Its state is the one seen, up to noise that is white, and no other candidate comes as close."
    IN_DOUBT = "It comes closest, but noise hides the difference to another token."
    UNEVEN = "It comes closest, but what it leaves is no noise: position, layer or model may be another one."
    NONE_AGREES = "No token of the vocabulary, as far as it was tested, has the state that was seen."

    @property
    def is_proven(self) -> bool:
        """Whether this is the token beyond doubt."""
        return self in (TokenStatus.AGREES, TokenStatus.WHITE)


_UNDECIDED = TokenStatus.NONE_AGREES  # while there are candidates left


@dataclass(frozen=True)
class FoundToken:
    """The closest candidate, what is known of it, and the text with it behind."""

    token: int
    standing: TokenStatus
    distance: float
    runner_up: float
    noise: float  # by the norm of the state
    continuation: Continuation
    num_candidates: int
    num_jacobians: int
    rivals: tuple[int, ...] = ()  # tested tokens that rounding does not exclude


def find_token(
    seen: Observation,
    text: Continuation,
    templates: Templates,
    first_scores: Float[Tensor, " vocab"],
    prior: Float[Tensor, " vocab"],
    settings: SearchSettings,
    equal: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    leading: Float[Tensor, "r m"] | None = None,
) -> Reading[FoundToken]:
    """Test candidates until one is accepted or none is left; tokens that are `equal` do not compete.

    Where noise is excluded, linear maps only rank tokens, and `leading` directions of the state are enough for that.
    """
    nothing = TestedTokens.none(templates.in_context.middle.shift)
    is_quiet = seen.noisy is False and not seen.confirm
    search = _Search(seen, text, templates, prior, nothing, equal, leading if is_quiet else None)
    order, scores, batch = first_scores, first_scores.clone(), settings.first
    limit = min(settings.max_candidates or len(scores), len(scores))
    while len(search.tested) < limit:
        yield from search.test(scores.topk(min(batch, limit - len(search.tested))).indices)
        if search.standing is not TokenStatus.NONE_AGREES:
            break
        if len(search.tested) <= settings.first < limit and settings.second and settings.max_linearisations:
            batch = settings.second
        elif search.is_at_best or search.tested.num_jacobians >= settings.max_linearisations:
            batch = min(batch * _GROWTH, LARGEST_BATCH)
        else:
            order = search.rank_tokens(order)
            scores, batch = order.clone(), settings.refined
        scores[search.tested.tokens] = -torch.inf
    return search.conclude()


@dataclass
class _Search:
    """The search at one position: what was tested, and the linear map at the closest candidate so far."""

    seen: Observation
    text: Continuation
    templates: Templates
    prior: Float[Tensor, " vocab"]
    tested: TestedTokens
    equal: Mapping[int, tuple[int, ...]]
    leading: Float[Tensor, "r m"] | None
    near: LocalMap | None = None
    near_token: int | None = None
    white: Whiteness | None = None

    @property
    def table(self) -> TokenStates:
        """What is known of the stream in the middle."""
        return (self.templates.in_context if self.text.num_known else self.templates.alone).middle

    @property
    def is_at_best(self) -> bool:
        """Whether the linear map was made at the closest candidate."""
        return self.tested.token == self.near_token

    def test(self, tokens: Int[Tensor, " k"]) -> Reading[None]:
        """Run candidates and compare."""
        self.white = None  # it was that of the closest candidate so far
        tell_detail(f"testing token {len(self.tested):,} of a vocabulary of {len(self.prior):,}")
        trial = yield RowPass(self.text, tokens)
        distances = self.seen.distances(trial.states)
        self.tested.add(trial, distances, (trial.middle - self.table.means(tokens)).sum(0))

    def linearise(self) -> LocalMap:
        """The linear map at the closest candidate."""
        assert self.tested.best is not None
        middle, weights, leading = self.tested.best.middle[0], self.seen.weights, self.leading
        if leading is None:
            state, jacobian = self.text.jacobian(middle)
            self.near = LocalMap(middle, state * weights, jacobian * weights[:, None])
        else:
            state, jacobian = self.text.jacobian(middle, leading * weights)
            self.near = LocalMap(middle, leading @ (state * weights), jacobian)
        self.near_token, self.white = self.tested.token, None
        self.tested.num_jacobians += 1
        return self.near

    def rank_tokens(self, order: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Tokens through that map; the context's shift is measured on all that were tested.

        Those that were likeliest so far, and the others behind them in the order that they had; the second time all.
        """
        shift = self.tested.offsets / len(self.tested)
        is_second = self.tested.num_jacobians == 1
        near, noise = self.linearise(), self.seen.noise_variance
        state = self.seen.state if self.leading is None else self.leading @ self.seen.state
        if is_second or len(order) <= _LIKELY:
            return posterior(linearised_scores(self.table, shift, state, near, noise), self.prior)
        chosen = order.topk(_LIKELY).indices
        scores = linearised_scores(self.table.only(chosen), shift, state, near, noise)
        ranked = posterior(scores, self.prior[chosen])
        behind = order - order.max() + ranked.min() - 1
        return behind.scatter(0, chosen, ranked)

    @property
    def standing(self) -> TokenStatus:
        """What is known of the closest candidate by now."""
        agrees = self.tested.distance <= self.seen.tolerance
        if agrees and not (self.seen.confirm or self.tested.distance > self.seen.usual):
            return TokenStatus.AGREES
        everything = len(self.tested) == len(self.prior)
        if everything and not self.is_at_best:
            self.linearise()
        if not self.is_at_best or self.near is None:
            return TokenStatus.NONE_AGREES
        if agrees:
            return self._against_others(TokenStatus.AGREES) if everything or not self.seen.against_all else _UNDECIDED
        may_be_noise = everything if self.seen.noisy is None else self.seen.noisy
        if may_be_noise and self.white is None:
            test = WhitenessTest.of(self.near.jacobian, self.table.spread)
            self.white = test(self.seen.state - self.near.state, self.seen.widths)
        if self.white is None or not self.white.is_white:
            return _UNDECIDED
        return self._against_others(TokenStatus.WHITE) if self.white.is_even else TokenStatus.UNEVEN

    def _against_others(self, proven: TokenStatus) -> TokenStatus:
        """Proven if the best candidate beats the runner-up, in noise that leaves something to see."""
        second = torch.tensor([self.tested.runner_up(self.equal)])
        is_open = bool(self.seen.leaves_open(self.tested.distance, second, self.relative_noise))
        is_quiet = max(self.relative_noise, self.seen.tolerance) <= LOUDEST
        return proven if is_quiet and not is_open else TokenStatus.IN_DOUBT

    @property
    def noise_variance(self) -> float:
        """Of a coordinate: as measured in what the closest candidate leaves, or as its rounding tells."""
        return self.seen.noise_variance if self.white is None else self.white.noise_variance

    @property
    def relative_noise(self) -> float:
        """The noise's length by the state's."""
        return float((self.noise_variance * len(self.seen.state)) ** 0.5 / lengths_of(self.seen.state))

    def conclude(self) -> FoundToken:
        """The closest candidate."""
        assert self.tested.best is not None
        return FoundToken(
            token=self.tested.token,
            standing=self.standing,
            distance=self.tested.distance,
            runner_up=self.tested.runner_up(self.equal),
            noise=self.relative_noise,
            continuation=self.text.accept(self.tested.best, 0),
            num_candidates=len(self.tested),
            num_jacobians=self.tested.num_jacobians,
            rivals=self._rivals(),
        )

    def _rivals(self) -> tuple[int, ...]:
        """Tokens that agree as well, up to what rounding may do, and are not of the closest one's class."""
        is_open = self.seen.leaves_open(self.tested.distance, self.tested.distances, self.relative_noise)
        own = self.equal.get(self.tested.token, (self.tested.token,))
        return tuple(token for token in self.tested.tokens[is_open].tolist() if token not in own)
