"""The token at one position, given the tokens before it: few candidates, each tested by its own state.

    1. test the likeliest tokens by the table of the layer that was seen
    2. linearise at the closest one so far, rank the whole vocabulary through that map, test the likeliest
    3. again from there; where the closest stays the same, further down the order, in growing batches, to the last token

A candidate is accepted when its recomputed state agrees with the one seen as far as rounding lets it; then its distance
is decades below all others. Where none agrees, noise may have been added: then the closest candidate is accepted if
what it leaves is white (whiteness.py) and if it beats its neighbours, which were tested too, by likelihood.

Notation: distance = ‖h(v) − h‖/‖h‖.
Limits: finds the token if the table's order is good or if the budget is the whole vocabulary; never accepts another one
unless noise hides the difference.
Cost: candidates are counted, and so are Jacobians (each is worth about d candidates).
Source: SipIt (arXiv 2510.15511) tests candidates in the order of a gradient's guess; the order here is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.continuation import Continuation, Trial
from unmask.attacks.outputs.ranking import Linearisation, linearised_scores, posterior
from unmask.attacks.outputs.templates import Templates, TokenStates
from unmask.attacks.outputs.whiteness import Whiteness, whiteness

_CLEAR = 12.0  # e¹² against the runner-up: a whole vocabulary of chances leaves fewer than one in three
_LOUDEST = 0.5  # noise of more than this share of a state's norm: nothing is claimed
_GROWTH = 4
_LARGEST_BATCH = 2048


@dataclass(frozen=True)
class Sighting:
    """What is seen at a position: the state, the noise in it, and how far a true candidate's state may be off."""

    state: Float[Tensor, " d"]
    tolerance: float  # on the relative distance
    noise_variance: float  # of a coordinate
    confirm: bool  # noise is so strong that the runner-up must be beaten by likelihood


@dataclass(frozen=True)
class SearchSettings:
    """How many candidates are tested at a time, and at most."""

    first: int = 8
    refined: int = 16
    max_linearisations: int = 3
    max_candidates: int | None = None  # None: the whole vocabulary


@dataclass
class Tested:
    """All candidates that were tested at a position, in the order of testing."""

    trials: list[Trial] = field(default_factory=list)
    distances: list[Tensor] = field(default_factory=list)
    num_jacobians: int = 0

    @property
    def tokens(self) -> Int[Tensor, " k"]:
        """Every candidate so far."""
        return torch.cat([trial.tokens for trial in self.trials])

    @property
    def middle(self) -> Float[Tensor, "k d"]:
        """Their streams in the middle."""
        return torch.cat([trial.middle for trial in self.trials])

    @property
    def best(self) -> tuple[Trial, int, float]:
        """The closest candidate: its batch, its place there, its distance."""
        closest = min(range(len(self.trials)), key=lambda batch: float(self.distances[batch].min()))
        place = int(self.distances[closest].argmin())
        return self.trials[closest], place, float(self.distances[closest][place])

    @property
    def runner_up(self) -> float:
        """The second smallest distance; infinite where there is none."""
        ordered = torch.cat(self.distances).sort().values
        return float(ordered[1]) if len(ordered) > 1 else float("inf")

    def __len__(self) -> int:
        return sum(len(trial.tokens) for trial in self.trials)


class Standing(Enum):
    """What is known of the closest candidate."""

    AGREES = "Its state is the one seen, up to rounding."
    WHITE = "Its state is the one seen, up to noise that is white, and no other candidate comes as close."
    IN_DOUBT = "It comes closest, but noise hides the difference to another token."
    NONE_AGREES = "No token of the vocabulary, as far as it was tested, has the state that was seen."

    @property
    def is_proven(self) -> bool:
        """Whether this is the token beyond doubt."""
        return self in (Standing.AGREES, Standing.WHITE)


@dataclass(frozen=True)
class FoundToken:
    """The closest candidate, what is known of it, and the text with it behind."""

    token: int
    standing: Standing
    distance: float
    runner_up: float
    noise: float  # by the norm of the state
    continuation: Continuation
    num_candidates: int
    num_jacobians: int


def find_token(
    seen: Sighting,
    text: Continuation,
    templates: Templates,
    first_scores: Float[Tensor, " vocab"],
    prior: Float[Tensor, " vocab"],
    settings: SearchSettings,
) -> FoundToken:
    """Test candidates until one is accepted or none is left."""
    search = _Search(seen, text, templates, prior, Tested())
    scores, batch = first_scores.clone(), settings.first
    limit = min(settings.max_candidates or len(scores), len(scores))
    while len(search.tested) < limit:
        search.test(scores.topk(min(batch, limit - len(search.tested))).indices)
        if search.standing is not Standing.NONE_AGREES:
            break
        if search.is_at_best or search.tested.num_jacobians >= settings.max_linearisations:
            batch = min(batch * _GROWTH, _LARGEST_BATCH)
        else:
            scores, batch = search.ranked(), settings.refined
        scores[search.tested.tokens] = -torch.inf
    return search.found()


@dataclass
class _Search:
    """The search at one position: what was tested, and the linear map at the closest candidate so far."""

    seen: Sighting
    text: Continuation
    templates: Templates
    prior: Float[Tensor, " vocab"]
    tested: Tested
    near: Linearisation | None = None
    near_token: int | None = None
    white: Whiteness | None = None

    @property
    def table(self) -> TokenStates:
        """Templates of the middle: those without a prefix for the first position."""
        is_first = bool(self.text.prefixes) and len(self.text.prefixes[0]) == 0
        return self.templates.alone if is_first else self.templates.middle

    @property
    def is_at_best(self) -> bool:
        """Whether the linear map was made at the closest candidate."""
        trial, place, _ = self.tested.best
        return int(trial.tokens[place]) == self.near_token

    def test(self, tokens: Int[Tensor, " k"]) -> None:
        """Run candidates and compare."""
        trial = self.text.trial(tokens)
        self.tested.trials.append(trial)
        self.tested.distances.append((trial.states - self.seen.state).norm(dim=1) / self.seen.state.norm())

    def ranked(self) -> Float[Tensor, " vocab"]:
        """All tokens through the linear map at the closest candidate; the context's shift is measured on all tested."""
        trial, place, _ = self.tested.best
        self.near = Linearisation(trial.middle[place], *self.text.jacobian(trial.middle[place]))
        self.near_token, self.white = int(trial.tokens[place]), None
        self.tested.num_jacobians += 1
        shift = (self.tested.middle - self.table.templates[self.tested.tokens]).mean(0)
        scores = linearised_scores(self.table, shift, self.seen.state, self.near, self.seen.noise_variance)
        return posterior(scores, self.prior)

    @property
    def standing(self) -> Standing:
        """What is known of the closest candidate by now."""
        distance = self.tested.best[2]
        if distance <= self.seen.tolerance and not self.seen.confirm:
            return Standing.AGREES
        if not self.is_at_best or self.near is None:
            return Standing.NONE_AGREES
        if distance <= self.seen.tolerance:
            return Standing.AGREES if self._gain(self.seen.noise_variance) >= _CLEAR else Standing.IN_DOUBT
        if self.white is None:
            self.white = whiteness(self.seen.state - self.near.state, self.near.jacobian, self.table.spread())
        if not self.white.is_white:
            return Standing.NONE_AGREES
        is_clear = self._gain(self.white.noise_variance) >= _CLEAR and self._relative_noise <= _LOUDEST
        return Standing.WHITE if is_clear else Standing.IN_DOUBT

    def _gain(self, variance: float) -> float:
        """By how much the best candidate is likelier than the runner-up, in logarithms."""
        square = float(self.seen.state.square().sum())
        return (self.tested.runner_up**2 - self.tested.best[2] ** 2) * square / (2 * variance)

    @property
    def _relative_noise(self) -> float:
        variance = self.seen.noise_variance if self.white is None else self.white.noise_variance
        return float((variance * len(self.seen.state)) ** 0.5 / self.seen.state.norm())

    def found(self) -> FoundToken:
        """The closest candidate."""
        trial, place, distance = self.tested.best
        return FoundToken(
            token=int(trial.tokens[place]),
            standing=self.standing,
            distance=distance,
            runner_up=self.tested.runner_up,
            noise=self._relative_noise,
            continuation=self.text.accepted(trial, place),
            num_candidates=len(self.tested),
            num_jacobians=self.tested.num_jacobians,
        )
