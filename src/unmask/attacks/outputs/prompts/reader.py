"""One text from its states: guess ahead while guesses hold, search the position where one fails.

The guess for a position is the likeliest token by the table of the layer seen and the model's own prediction; a whole
window of guesses is tested in one pass, and the window grows while it holds and shrinks when it does not. What a text
needs next is yielded, so that several texts share a pass (side_by_side.py).

Where a stream is seen, the blocks behind it predict every next token at once. A cache has no stream: the model reads
the tokens that are known, and predicts one token ahead.

What is narrow or coarse may not tell tokens apart that lie close to each other. There the nearest ones by the table are
tested beside the one that agrees; those that agree as well are reported as open. A first token hardly changes its own
row in deep blocks, but it changes the next one: of coarse rows it is proven only together with that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.chance import ChanceAgreement
from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.equal_tokens import NEAR, Classes, settle_class
from unmask.attacks.outputs.prompts.first_pair import find_first_again
from unmask.attacks.outputs.prompts.nearest import ExpectedStates, read_nearest
from unmask.attacks.outputs.prompts.position_search import (
    LOUDEST,
    FoundToken,
    Observation,
    SearchSettings,
    TokenStatus,
    find_token,
)
from unmask.attacks.outputs.prompts.rivals import settle_rivals
from unmask.attacks.outputs.prompts.row_scores import RowScores
from unmask.attacks.outputs.prompts.seen_text import (
    Beginning,
    BeginningStatus,
    Begun,
    NearestText,
    ReadText,
    ReadToken,
    SeenText,
    TextProgress,
    begin,
)
from unmask.attacks.outputs.prompts.shared_error import doubt_shared_error
from unmask.attacks.outputs.prompts.side_by_side import Reading, RowPass, SharedProgress, read_alone
from unmask.attacks.outputs.prompts.templates import Templates
from unmask.attacks.run import Progress
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.models.readouts import FINAL_NORM, Readout
from unmask.proof.state_noise import lengths_of, measure_rounding

__all__ = ["PromptReader", "ReadText", "ReadToken"]
_NOISY = (TokenStatus.WHITE, TokenStatus.IN_DOUBT, TokenStatus.UNEVEN)
_NARROWEST_WINDOW, _WIDEST_WINDOW = 4, 16  # a pass costs as much as some ten rows: guesses beside it are cheap
_CONFIRM = 0.02  # noise of more than this share: a token must also win by likelihood
_CROWDED = 5e-3  # a tolerance above this may hold a neighbour of the right token
_NARROW = 0.5  # of the stream's width: what is seen may miss what tells two tokens apart
_FINE = 5e-4  # above this a first token, which hardly changes its own row, must be borne out by the next row
_CROWD = 64  # tokens that may agree as well; where there are more, all are tested
_REACH = 4.0  # tolerances: two states that agree with one seen are two apart; embeddings may be further
_BESIDE = 2.0  # the same of tokens at random, where a stream is rounded
_BEFORE_PAIRS = 256  # second tokens that are tested before the first one is doubted
_NEIGHBOURS, _FIRST_NEIGHBOURS = 16, 64
_SAMPLED = 48  # tokens at random that are tested beside them
_BY_CHANCE = 1e-3  # wrong tokens that may agree by chance; where more do, every token is tested
_CONFIRM_NEAR = 0.1  # the same as _CONFIRM where neighbours are tested in any case


@dataclass(frozen=True)
class PromptReader:
    """Everything that does not depend on the text."""

    model: Model
    layer: int
    readout: Readout
    templates: Templates
    settings: SearchSettings
    computing_error: float
    equal: Classes
    factor: float = 1.0  # what is seen is so many times what the model computes

    @cached_property
    def expected(self) -> tuple[ExpectedStates, ExpectedStates]:
        """The states of first tokens, and of others."""
        every = torch.arange(self.model.vocab_size, device=self.model.device)
        return tuple(  # type: ignore[return-value]
            ExpectedStates(tables.seen.means(every)) for tables in (self.templates.alone, self.templates.in_context)
        )

    @cached_property
    def scores(self) -> RowScores:
        """How likely every token is in a row, before anything is tested."""
        return RowScores(self.model, self.layer, self.readout, self.templates)

    def read(
        self, states: Float[Tensor, "n m"], position: int, progress: Progress, beginning: Beginning | None = None
    ) -> ReadText:
        """Read one text by itself."""
        tell = SharedProgress(progress, len(states)).add_text()
        return read_alone(self.reading(states, position, tell, beginning))

    def reading(
        self,
        states: Float[Tensor, "n m"],
        position: int,
        tell: Callable[[int], None],
        beginning: Beginning | None = None,
    ) -> Reading[ReadText]:
        """Read one text; it stops where no token agrees, as all later states depend on that one."""
        seen = self.see(states, position)
        text, begun = self._begin(seen, Beginning(position=position) if beginning is None else beginning)
        while text.done < len(states):
            tell(text.done)
            go_on = (yield from self._guess_ahead(text)) or (yield from self._search(text))
            if not (go_on or (yield from self._first_again(text))):
                break
        settle_rivals(text)
        doubt_shared_error(text)
        if text.needs_next and len(text.tokens) == 1:
            text.tokens = [replace(text.tokens[0], proven=False)]
        stopped = text.done if text.done < len(states) else None
        if stopped is not None and text.tokens and self.readout.is_stream:
            is_rounded = float(seen.roundings[stopped - 1]) > 0
            text.tokens[-1] = replace(text.tokens[-1], proven=text.tokens[-1].proven and not is_rounded)
        nearest = yield from self._read_on(text)
        noise = max(text.noise, default=0.0)
        costs = text.num_candidates, text.num_jacobians
        return ReadText(
            tuple(text.tokens),
            len(states),
            noise,
            *costs,
            text.given,
            begun.status,
            text.is_mismatch,
            begun.before,
            stopped=stopped,
            nearest=nearest,
            factor=self.factor,
        )

    def _read_on(self, text: TextProgress) -> Reading[NearestText | None]:
        """Where a text is not proven, put the nearest tokens behind the proven ones."""
        known = list(itertools.takewhile(lambda token: token.proven, text.tokens))
        first, seen = len(text.given) + len(known), text.seen
        if first == len(seen) or self.settings.max_candidates is not None:
            return None  # nothing is left, or it would cost more candidates than are allowed
        tokens = torch.tensor([token.token for token in known], dtype=torch.long, device=seen.stored.device)
        begun = text.start.advance(text.start.run(tokens), len(tokens)) if known else text.start
        nearest = yield from read_nearest(seen, begun, *self.expected, first)
        text.num_candidates += nearest.num_tested
        if sum(nearest.cosines) > self._likeness(text, begun, first):
            pairs = zip(nearest.tokens, nearest.cosines, seen.noise.tolerances[first:].tolist(), strict=True)
            text.tokens = [
                *known,
                *(
                    ReadToken(token, False, math.sqrt(max(0.0, 1 - cosine**2)), tolerance, is_nearest=True)
                    for token, cosine, tolerance in pairs
                ),
            ]
        return nearest

    def _likeness(self, text: TextProgress, begun: Continuation, first: int) -> float:
        """The sum of cosines of a text that was read to its end, behind `first` rows; none is as far as can be."""
        tail = [token.token for token in text.tokens[first - len(text.given) :]]
        if text.done < len(text.seen):
            return -math.inf
        rows = begun.run(torch.tensor(tail, device=text.seen.stored.device)).states * text.seen.weights[first:]
        return float(torch.nn.functional.cosine_similarity(rows, text.seen.states[first:]).sum())

    @torch.no_grad()
    def guess(self, states: Float[Tensor, "n m"], position: int) -> ReadText:
        """The likeliest token at each position by the table alone: nothing is recomputed, nothing is proven."""
        seen = self.see(states, position)
        best = self.scores.metric.score_rows(seen.aligned).argmax(1)
        tokens = tuple(ReadToken(int(token), False, float("inf"), 0.0) for token in best)
        return ReadText(tokens, len(states), 0.0, 0, 0, (), BeginningStatus.NONE)

    def see(self, states: Float[Tensor, "n m"], position: int) -> SeenText:
        """What rows say, with their noise."""
        positions = position + torch.arange(len(states), device=states.device)
        weights, widths = self.readout.weights(self.model, states), self.readout.split(self.model, states.shape[1])
        noise = measure_rounding(states, self.computing_error, weights, widths)  # in the digits that were stored
        if self.factor != 1:
            stored, states = states * weights, states / self.factor
            weights = self.readout.weights(self.model, states)
            noise = noise.scaled(lengths_of(states * weights) / lengths_of(stored))
        aligned = self.readout.align(self.model, states, positions)
        return SeenText(states, aligned, weights, states * weights, position, noise)

    def _begin(self, seen: SeenText, beginning: Beginning) -> tuple[TextProgress, Begun]:
        middle = self.templates.middle_layer
        start = Continuation.start(
            self.model, self.layer, position=seen.position, middle_layer=middle, readout=self.readout
        )
        begun = begin(seen, start, self.templates, beginning)
        text = TextProgress(seen, begun.continuation, begun.continuation, begun.given, *self.scores.predictions(seen))
        if not self.readout.is_stream and self.layer and text.features is not None:
            where = beginning.position if begun.continuation.num_known else seen.position
            text.predictor = Continuation.start(self.model, self.model.num_blocks, position=where, readout=FINAL_NORM)
            text.unpredicted = list(beginning.tokens[: begun.continuation.num_known])
        if begun.noise is not None:
            text.is_noisy = True
            text.noise.append(begun.noise)
        return text, begun

    def _is_crowded(self, text: TextProgress, rows: slice) -> bool:
        """Whether neighbours of the right token may agree as well."""
        if self.readout.is_stream:
            return False
        narrow = text.seen.stored.shape[1] < _NARROW * self.model.width
        wide_tolerance = bool((text.seen.noise.tolerances[rows] > _CROWDED).any())
        return narrow or wide_tolerance or text.continuation.num_known == 0

    def _guess_ahead(self, text: TextProgress) -> Reading[bool]:
        """Test a window of guesses at once and keep those that agree; False if the first one does not.

        It ends before a token that has others like it: which of them agrees best is for the search to say.
        """
        done, seen = text.done, text.seen
        window = slice(done, min(done + text.window, len(seen)))
        if text.continuation.num_known == 0 or text.is_noisy or self._is_crowded(text, window):
            return False
        tolerance = float(seen.noise.tolerances[window].max())
        is_coarse = tolerance > _CROWDED or bool((seen.roundings[window] > _CONFIRM).any())
        if is_coarse or self._may_agree(text, tolerance):
            return False
        guess = self.scores(text, window).scores.argmax(1)
        near = self._near(text, guess.tolist(), _REACH * tolerance)
        alone = [int(token) not in near for token in guess]
        if False in alone:
            guess = guess[: alone.index(False)]
        if not len(guess):
            return False
        trial = yield RowPass(text.continuation, guess, in_order=True)
        distances = seen.distances(trial.states, done)
        tolerances = seen.noise.tolerances[done : done + len(guess)]
        held = int((distances <= seen.usual[done : done + len(guess)]).int().cumprod(0).sum())
        text.num_candidates += len(guess)
        text.continuation = text.continuation.advance(trial, held)
        proven = text.is_proven
        for token, distance, tolerance in zip(guess[:held], distances[:held], tolerances[:held], strict=True):
            text.add(ReadToken(int(token), proven, float(distance), float(tolerance)))
        text.window = min(2 * text.window, _WIDEST_WINDOW) if held == len(guess) else max(_NARROWEST_WINDOW, held)
        return held > 0

    def _search(self, text: TextProgress) -> Reading[bool]:
        """Find the token of the next position; False if none agrees and the text ends there."""
        index, seen, is_first = text.done, text.seen, text.continuation.num_known == 0
        relative = float(seen.roundings[index])
        tolerance = float(seen.noise.tolerances[index])
        loud = _CONFIRM if self.readout.is_stream else _CONFIRM_NEAR
        sighting = Observation(
            state=seen.states[index],
            weights=seen.weights[index],
            tolerance=tolerance,
            usual=float(seen.usual[index]),
            noise_variance=float(seen.noise.variances[index]),
            unevenness=float(seen.noise.unevenness[index]),
            confirm=relative > (0 if is_first else loud),
            against_all=is_first and relative > loud,
            noisy=False if _has_gaps(seen.stored[index]) else text.is_noisy if index else None,
            widths=self.readout.split(self.model, seen.states.shape[1]),
        )
        found = yield from self._find(text, sighting)
        found, equals, are_all = yield from self._settle(text, sighting, found)
        others = self._others(found, equals)
        rivals = set() if self.readout.is_stream else others | self._others(found, found.rivals)
        if is_first and self.layer and not self.readout.is_stream and tolerance > _FINE:
            text.needs_next = found.num_candidates < self.model.vocab_size
        text.num_candidates += found.num_candidates
        text.num_jacobians += found.num_jacobians
        text.noise.append(found.noise)
        agrees = bool(rivals) and found.distance <= sighting.tolerance and max(found.noise, tolerance) <= LOUDEST
        text.is_noisy |= found.standing in _NOISY and not agrees
        text.is_mismatch |= found.standing is TokenStatus.UNEVEN and not agrees
        if found.standing is TokenStatus.NONE_AGREES:
            return False
        text.continuation = found.continuation
        token = _read_token(found, sighting, text.is_proven, equals)
        token = replace(token, rivals=tuple(sorted(rivals)), is_crowded=self.readout.is_stream and bool(others))
        text.add(replace(token, are_all_rivals=are_all, stands=found.standing.is_proven or agrees))
        return True

    def _settle(
        self, text: TextProgress, sighting: Observation, found: FoundToken
    ) -> Reading[tuple[FoundToken, tuple[int, ...], bool]]:
        """Test tokens that may agree as well beside the one that was found; all of them where any other one may.

        Gives the closest one, the class that the row leaves open, and whether every token was tested.
        """
        equals: tuple[int, ...] = ()
        are_all = found.num_candidates == self.model.vocab_size
        if found.standing is TokenStatus.NONE_AGREES or max(found.noise, sighting.tolerance) > LOUDEST:
            return found, equals, are_all  # nothing is proven of it
        members, num_rivals = self._members(text, sighting, found), len(found.rivals)
        if len(members) > 1:
            found, equals = yield from settle_class(sighting, text.continuation, found, members)
        is_open = self._may_agree(text, sighting.tolerance)
        if self.readout.is_stream:
            is_open |= len(members) > _CROWD or bool(self._others(found, equals))
            is_crowded, reach = sighting.tolerance > _CROWDED and not sighting.confirm, _BESIDE
        else:
            is_crowded, reach = self._is_crowded(text, slice(text.done, text.done + 1)), _REACH
        if not is_open and is_crowded and text.continuation.num_known:
            is_open = yield from self._is_dense(text, sighting, found, reach)
        if not is_open or (are_all and num_rivals <= _CROWD):
            return found, equals, are_all
        if self.settings.max_candidates is not None:
            return replace(found, standing=TokenStatus.IN_DOUBT), equals, are_all
        every = range(self.model.vocab_size)
        found, equals = yield from settle_class(sighting, text.continuation, found, every)
        if found.distance <= sighting.tolerance and max(found.noise, sighting.tolerance) <= LOUDEST:
            found = replace(found, standing=TokenStatus.AGREES)  # what else agrees is in `equals`
        return found, equals, True

    def _others(self, found: FoundToken, tokens: Iterable[int]) -> set[int]:
        """Those of some tokens that are not of the class of the one that was found."""
        return set(tokens) - {found.token, *self.equal.get(found.token, ())}

    def _first_again(self, text: TextProgress) -> Reading[bool]:
        """Where nothing agrees behind a first token that its own row hardly tells: look for both together, once.

        If that fails, all second tokens are tested behind the first one that was taken.
        """
        if not text.may_try_again:
            return False
        text.is_second_try = True
        scores = self.scores(text, slice(1, 2)).scores[0]
        if text.predictor is not None:  # it has read the token that was taken
            text.predictor = Continuation.start(
                self.model, self.model.num_blocks, position=text.seen.position, readout=FINAL_NORM
            )
            text.is_predicted[1] = False
        return find_first_again(text, scores, self.equal) or (yield from self._search(text))

    def _find(self, text: TextProgress, sighting: Observation) -> Reading[FoundToken]:
        """The closest token. In the lower half of the model its own prediction is asked for only if it is needed."""
        where = slice(text.done, text.done + 1)

        def search(settings: SearchSettings) -> Reading[FoundToken]:
            row = self.scores(text, where)
            likely, leading = (row.scores[0], row.prior[0]), self.scores.leading
            return find_token(sighting, text.continuation, self.templates, *likely, settings, self.equal, leading)

        num_candidates = 0
        if text.predictor is not None and not sighting.confirm and 2 * self.layer <= self.model.num_blocks:
            found = yield from search(replace(self.settings, max_candidates=self.settings.first))
            if found.standing is TokenStatus.AGREES:
                return found
            num_candidates = found.num_candidates
        yield from text.predict_next()
        few = min(_BEFORE_PAIRS, self.settings.max_candidates or _BEFORE_PAIRS)
        found = yield from search(replace(self.settings, max_candidates=few) if text.may_try_again else self.settings)
        return replace(found, num_candidates=found.num_candidates + num_candidates)

    def _may_agree(self, text: TextProgress, tolerance: float) -> bool:
        """Tell whether a wrong token may agree with the next row by chance."""
        chance = self.chances[0 if text.continuation.num_known else 1]
        return self.model.vocab_size * chance(2 * tolerance) > _BY_CHANCE  # both agree with what is seen

    @cached_property
    def chances(self) -> tuple[ChanceAgreement, ChanceAgreement]:
        """How often two tokens agree by chance, in a context and first of all."""
        context, alone = self.templates.in_context.seen, self.templates.alone.seen
        of = partial(ChanceAgreement.of, self.model, readout=self.readout)
        return compute_once(self.model, ("chances", self.layer, self.readout), lambda: (of(context), of(alone)))

    def _near(self, text: TextProgress, tokens: list[int], reach: float) -> Classes:
        """Classes of tokens whose states may agree as well: those that lie around each, by the norm of what is seen.

        By the states that are expected, which may lie closer than embeddings. By what enters the model, too, where a
        stream is rounded; there first tokens must beat others by likelihood.
        """
        is_first = text.continuation.num_known == 0
        near = {token: {*self.equal.get(token, (token,))} for token in tokens}
        if reach <= NEAR or not (self.readout.is_stream and is_first):
            table = (self.templates.alone if is_first else self.templates.in_context).seen
            weights, length = text.seen.weights[text.done], float(lengths_of(text.seen.states[text.done]))
            near = {token: close | table.near(token, reach * length, weights) for token, close in near.items()}
        if reach > NEAR and self.readout.is_stream:
            entering = near_rows(self.rows, tokens, reach)
            near = {token: {*close, *entering[token]} for token, close in near.items()}
        return {token: tuple(sorted(members)) for token, members in near.items() if len(members) > 1}

    def _is_dense(self, text: TextProgress, sighting: Observation, found: FoundToken, reach: float) -> Reading[bool]:
        """Tell whether tokens at random come near what is seen, as where a context leaves little of any token."""
        order = torch.randperm(self.model.vocab_size, generator=torch.Generator().manual_seed(0))
        sample = order[:_SAMPLED].to(sighting.state.device)
        trial = yield RowPass(text.continuation, sample)
        text.num_candidates += len(sample)
        others = ~torch.isin(sample, sample.new_tensor(self.equal.get(found.token, (found.token,))))
        return bool((sighting.distances(trial.states)[others] <= reach * sighting.tolerance).any())

    @cached_property
    def rows(self) -> Float[Tensor, "vocab d"]:
        """What enters the model for each token."""
        with torch.no_grad():
            every = torch.arange(self.model.vocab_size, device=self.model.device)
            return self.model.embed(every, torch.zeros_like(every))

    def _members(self, text: TextProgress, sighting: Observation, found: FoundToken) -> tuple[int, ...]:
        """Tokens that may agree as well as the one that was found, itself included."""
        token, index = found.token, text.done
        reach = sighting.reach(found.distance, found.noise) if found.noise > 0 else _REACH * sighting.tolerance
        members = set(self._near(text, [token], reach).get(token, (token,)))
        members |= set(found.rivals if len(found.rivals) <= _CROWD else ())
        if self._is_crowded(text, slice(index, index + 1)):
            metric = self.scores.metric_at(text)
            number = min(_NEIGHBOURS if text.continuation.num_known else _FIRST_NEIGHBOURS, len(metric.rows))
            near = metric.scores(metric.rows[token][None])[0].topk(number).indices
            members |= set(near.tolist())
        return tuple(sorted(members))


def _has_gaps(row: Float[Tensor, " m"]) -> bool:
    """Whether entries were left out, which is no noise that is the same in all directions."""
    return 2 <= int((row == 0).sum()) < len(row)


def _read_token(found: FoundToken, seen: Observation, behind_proven: bool, equals: tuple[int, ...]) -> ReadToken:
    """What was found; nothing is proven behind a token in doubt, as states depend on all tokens before them."""
    tolerance = max(seen.tolerance, found.distance) if found.standing is TokenStatus.WHITE else seen.tolerance
    proven = found.standing.is_proven and behind_proven
    return ReadToken(found.token, proven, found.distance, tolerance, found.runner_up, equals)
