"""One text from its states: guess ahead while guesses hold, search the position where one fails.

The guess for a position is the likeliest token by the table of the layer seen and the model's own prediction; a whole
window of guesses is tested in one pass, and the window grows while it holds and shrinks when it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.equal_tokens import Classes, settle_class
from unmask.attacks.outputs.prompts.position_search import (
    FoundToken,
    Observation,
    SearchSettings,
    TokenStatus,
    find_token,
)
from unmask.attacks.outputs.prompts.ranking import Metric, direct_metric, posterior
from unmask.attacks.outputs.prompts.templates import Templates
from unmask.attacks.outputs.state_noise import StateNoise, measure_rounding
from unmask.attacks.run import Progress
from unmask.models.adapter import Model

_WIDEST_WINDOW = 16
_CONFIRM = 0.02  # noise of more than this share: a token must also win by likelihood
_SURPRISE = 0.1  # the prior's share for what the model does not expect


@dataclass(frozen=True)
class ReadToken:
    """A token and how its recomputed state compares with the one seen.

    `proven`: its state agrees, and so do those of all tokens before it. `equals` are all tokens that the state leaves
    open, this one included, where it is not alone.
    """

    token: int
    proven: bool
    distance: float
    tolerance: float
    runner_up: float | None = None  # the closest candidate that was refused
    equals: tuple[int, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether this token stands here, and no other one."""
        return self.proven and not self.equals


@dataclass(frozen=True)
class ReadText:
    """The tokens as far as they could be read, and what it cost."""

    tokens: tuple[ReadToken, ...]
    length: int
    noise: float  # by the norm of its state, the strongest of all positions
    num_candidates: int
    num_jacobians: int

    @property
    def proven(self) -> bool:
        """Whether every position was read and proven, up to tokens that no state tells apart."""
        return len(self.tokens) == self.length and all(token.proven for token in self.tokens)

    @property
    def certain(self) -> bool:
        """Whether this is the text, and no other one."""
        return self.proven and all(token.certain for token in self.tokens)


@dataclass
class _Progress:
    """A text while it is read."""

    continuation: Continuation
    tokens: list[ReadToken]
    noise: list[float] = field(default_factory=list)
    num_candidates: int = 0
    num_jacobians: int = 0
    is_noisy: bool = False
    window: int = 4

    @property
    def is_proven(self) -> bool:
        """Whether every token so far is."""
        return all(token.proven for token in self.tokens)


@dataclass(frozen=True)
class PromptReader:
    """Everything that does not depend on the text."""

    model: Model
    layer: int
    normed: bool
    templates: Templates
    settings: SearchSettings
    computing_error: float
    equal: Classes

    @cached_property
    def metric(self) -> Metric:
        """States of the layer seen, whitened."""
        return direct_metric(self.templates.in_context.seen)

    @cached_property
    def first_metric(self) -> Metric:
        """The same for a text's first token."""
        return direct_metric(self.templates.alone.seen)

    @torch.no_grad()
    def read(self, states: Float[Tensor, "n d"], position: int, number: int, progress: Progress) -> ReadText:
        """Read one text; it stops where no token agrees, as all later states depend on that one."""
        noise = measure_rounding(states, self.computing_error)
        start = Continuation.start(
            self.model, self.layer, position=position, middle_layer=self.templates.middle_layer, normed=self.normed
        )
        text = _Progress(start, [])
        prior = self._prior(states, position)
        while len(text.tokens) < len(states):
            progress(f"reading text {number + 1}", len(text.tokens), len(states))
            if not (self._guess_ahead(text, states, noise, prior) or self._search(text, states, noise, prior)):
                break
        return ReadText(
            tuple(text.tokens), len(states), max(text.noise, default=0.0), text.num_candidates, text.num_jacobians
        )

    def _prior(self, states: Float[Tensor, "n d"], position: int) -> Float[Tensor, "n d"] | None:
        """What the model makes of the states: the rows that its output layer reads, each about the next token."""
        if self.model.unembedding is None:
            return None
        x, positions = states[None], position + torch.arange(len(states), device=states.device)[None]
        mask = torch.ones_like(positions, dtype=torch.bool)
        for block in range(self.layer, self.model.num_blocks):
            x = self.model.block_forward(block, x, positions, mask)
        return x[0] if self.normed else self.model.final_norm(x[0])

    def _log_prior(self, features: Tensor | None, where: Int[Tensor, " k"]) -> Float[Tensor, "k vocab"]:
        """log of the model's prediction for some positions, mixed with even chances."""
        size = self.model.vocab_size
        even = torch.full((len(where), size), 1.0, device=where.device).mul_(_SURPRISE / size)
        unembedding = self.model.unembedding
        if features is None or unembedding is None:
            return even.log()
        known = where > 0
        said = (features[where[known] - 1] @ unembedding[:size].T).softmax(-1)
        even[known, : said.shape[1]] += (1 - _SURPRISE) * said.to(even)
        return even.log()

    def _scores(self, states: Tensor, features: Tensor | None, where: Int[Tensor, " k"]) -> Float[Tensor, "k vocab"]:
        metric = self.metric if bool((where > 0).all()) else self.first_metric
        return posterior(metric.scores(states[where] @ metric.whiten.T), self._log_prior(features, where))

    def _guess_ahead(self, text: _Progress, states: Tensor, noise: StateNoise, features: Tensor | None) -> bool:
        """Test a window of guesses at once and keep those that agree; False if the first one does not.

        It ends before a token that has others like it: which of them agrees best is for the search to say.
        """
        done = len(text.tokens)
        if done == 0 or text.is_noisy or bool((noise.relative(states)[done : done + text.window] > _CONFIRM).any()):
            return False
        where = torch.arange(done, min(done + text.window, len(states)), device=states.device)
        guess = self._scores(states, features, where).argmax(1)
        alone = [int(token) not in self.equal for token in guess]
        if False in alone:
            where, guess = where[: alone.index(False)], guess[: alone.index(False)]
        if not len(guess):
            return False
        seen, prefixes = text.continuation.run(guess)
        distances = (seen - states[where]).norm(dim=1) / states[where].norm(dim=1)
        held = int((distances <= noise.tolerances[where]).int().cumprod(0).sum())
        text.num_candidates += len(where)
        text.continuation = text.continuation.advance(prefixes, held)
        for token, distance, index in zip(guess[:held], distances[:held], where[:held], strict=True):
            tolerance = float(noise.tolerances[index])
            text.tokens.append(ReadToken(int(token), text.is_proven, float(distance), tolerance))
        text.window = min(2 * text.window, _WIDEST_WINDOW) if held == len(where) else max(1, held)
        return held > 0

    def _search(self, text: _Progress, states: Tensor, noise: StateNoise, features: Tensor | None) -> bool:
        """Find the token of the next position; False if none agrees and the text ends there."""
        index = len(text.tokens)
        where = torch.tensor([index], device=states.device)
        relative = float(noise.relative(states)[index])
        sighting = Observation(
            state=states[index],
            tolerance=float(noise.tolerances[index]),
            noise_variance=float(noise.variances[index]),
            confirm=relative > (_CONFIRM if index else 0),
            against_all=index == 0 and relative > _CONFIRM,
            noisy=text.is_noisy if text.tokens else None,
        )
        prior = self._log_prior(features, where)[0]
        first = self._scores(states, features, where)[0]
        found = find_token(sighting, text.continuation, self.templates, first, prior, self.settings, self.equal)
        equals: tuple[int, ...] = ()
        if found.token in self.equal and found.standing is not TokenStatus.NONE_AGREES:
            found, equals = settle_class(sighting, text.continuation, found, self.equal[found.token])
        text.num_candidates += found.num_candidates
        text.num_jacobians += found.num_jacobians
        text.noise.append(found.noise)
        text.is_noisy |= found.standing in (TokenStatus.WHITE, TokenStatus.IN_DOUBT)
        if found.standing is TokenStatus.NONE_AGREES:
            return False
        text.continuation = found.continuation
        text.tokens.append(_read_token(found, sighting, text.is_proven, equals))
        return True


def _read_token(found: FoundToken, seen: Observation, behind_proven: bool, equals: tuple[int, ...]) -> ReadToken:
    """What was found; nothing is proven behind a token in doubt, as states depend on all tokens before them."""
    tolerance = max(seen.tolerance, found.distance) if found.standing is TokenStatus.WHITE else seen.tolerance
    proven = found.standing.is_proven and behind_proven
    return ReadToken(found.token, proven, found.distance, tolerance, found.runner_up, equals)
