"""What is seen of one text, what was known of its beginning, and the text while it is read.

A known beginning (a chat template, a system prompt) is run like any other tokens. Where its rows are seen, they must
agree: up to rounding, or up to noise that is white. Its last token may be another one, as a tokenizer may merge it with
what follows. A beginning that does not agree is said to be wrong, and is not used.

Notation: m the entries of a row; row i is at position `position` + i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.position_search import LOUDEST
from unmask.attacks.outputs.prompts.side_by_side import Reading, RowPass
from unmask.attacks.outputs.prompts.templates import Templates
from unmask.proof.state_noise import StateNoise, lengths_of
from unmask.proof.whiteness import WhitenessTest


@dataclass(frozen=True)
class SeenText:
    """Rows as they are stored, as they are ranked and as they are compared, and the noise in those."""

    stored: Float[Tensor, "n m"]
    aligned: Float[Tensor, "n m"]  # as they were at position 0
    weights: Float[Tensor, "n m"]
    states: Float[Tensor, "n m"]  # stored, with the weights
    position: int
    noise: StateNoise

    def __len__(self) -> int:
        return len(self.stored)

    @cached_property
    def roundings(self) -> Float[Tensor, " n"]:
        """The length of each row's rounding by that of the row."""
        return self.noise.relative(self.states)

    @cached_property
    def usual(self) -> Float[Tensor, " n"]:
        """Distances that the right candidates keep to, as a rule."""
        return self.noise.usual(self.states)

    def distances(self, rows: Float[Tensor, "k m"], first: int = 0) -> Float[Tensor, " k"]:
        """How far rows are from those seen, from row `first` on, by the norm of each."""
        part = slice(first, first + len(rows))
        return (rows * self.weights[part] - self.states[part]).norm(dim=1) / lengths_of(self.states[part])

    def distances_at(self, rows: Float[Tensor, "k m"], index: int) -> Float[Tensor, " k"]:
        """How far candidates for one row are from it."""
        return (rows * self.weights[index] - self.states[index]).norm(dim=1) / lengths_of(self.states[index])


class BeginningStatus(Enum):
    """What became of a known beginning."""

    NONE = "No beginning was given."
    FITS = "The rows of the known beginning agree with those that were seen."
    UNSEEN = "No row of the known beginning was seen; the rows behind it are read as if it were true."
    WRONG = "The text does not start with the known beginning: their rows disagree."
    DOUBTED = (
        "The text probably does not start with the known beginning: after it no token agrees with the first row seen."
    )
    TOO_SHORT = "The known beginning ends before the first row that was seen, and the tokens between are unknown."


@dataclass(frozen=True)
class Beginning:
    """Tokens that a text is known to begin with, the first one at `position`."""

    tokens: tuple[int, ...] = ()
    position: int = 0


@dataclass(frozen=True)
class Begun:
    """Where a text is read on: behind its beginning, or at its start."""

    continuation: Continuation
    status: BeginningStatus
    given: tuple[int, ...] = ()  # tokens of rows that were seen
    before: tuple[int, ...] = ()  # tokens before the first row that was seen
    noise: float | None = None  # by the norm of a row, where noise was established


def begin(seen: SeenText, start: Continuation, templates: Templates, beginning: Beginning) -> Begun:
    """Run the beginning, compare it with what is seen of it, and go on behind it if it agrees."""
    before = seen.position - beginning.position
    tokens = torch.tensor(beginning.tokens[: before + len(seen)], dtype=torch.long, device=seen.stored.device)
    if not len(tokens):
        return Begun(start, BeginningStatus.NONE)
    if len(tokens) < before:
        return Begun(start, BeginningStatus.TOO_SHORT)
    first = Continuation.start(
        start.model,
        len(start.prefixes),
        position=beginning.position,
        middle_layer=start.middle_layer,
        readout=start.readout,
    )
    trial = first.run(tokens)
    num_shown = len(tokens) - before
    unseen = tuple(tokens[:before].tolist())
    if num_shown == 0:
        return Begun(first.advance(trial, len(tokens)), BeginningStatus.UNSEEN, before=unseen)
    distances = seen.distances(trial.states[before:])
    held = int((distances <= seen.noise.tolerances[:num_shown]).int().cumprod(0).sum())
    noise = None
    if held < max(1, num_shown - 1):
        noise = _white_noise(seen, first.advance(trial, len(tokens) - 1), templates, num_shown - 1, tokens[-1:])
        if noise is None or float(distances.max()) > LOUDEST:
            return Begun(start, BeginningStatus.WRONG)
        held = num_shown
    given = tuple(tokens[before : before + held].tolist())
    return Begun(first.advance(trial, before + held), BeginningStatus.FITS, given, unseen, noise)


def _white_noise(seen: SeenText, text: Continuation, templates: Templates, row: int, token: Tensor) -> float | None:
    """The noise at a row, by its norm, if what a token leaves there is white; None if it is not."""
    trial = text.trial(token)
    state, jacobian = text.jacobian(trial.middle[0])
    weights = seen.weights[row]
    table = (templates.in_context if text.num_known else templates.alone).middle
    widths = text.readout.split(text.model, len(weights))
    white = WhitenessTest.of(jacobian * weights[:, None], table.spread)(seen.states[row] - state * weights, widths)
    relative = (white.noise_variance * len(weights)) ** 0.5 / float(lengths_of(seen.states[row]))
    return relative if white.is_white and white.is_even and relative <= LOUDEST else None


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
    rivals: tuple[int, ...] = ()  # tokens that this state alone does not exclude; later ones may
    is_crowded: bool = False  # whether tokens agree as well whose embeddings are others
    are_all_rivals: bool = True  # whether every token was tested, so that no other one agrees
    stands: bool = True  # whether the state agrees, whatever stands before it
    is_nearest: bool = False  # whether it was taken for the direction of its state alone (nearest.py)

    @property
    def certain(self) -> bool:
        """Whether this token stands here, and no other one."""
        return self.proven and not self.equals

    @property
    def is_guess(self) -> bool:
        """Whether nothing was recomputed."""
        return self.distance == float("inf")


@dataclass(frozen=True)
class NearestText:
    """Tokens behind the proven ones, by the directions of states alone (nearest.py)."""

    tokens: tuple[int, ...]
    cosines: tuple[float, ...]  # of the state of each with the one seen
    factors: tuple[float, ...]  # how much longer states are than theirs, where they agree but for that
    is_drowned: bool  # whether all rows are longer than states, none nearer to a token than chance; or nothing is there
    num_tested: int


@dataclass(frozen=True)
class ReadText:
    """The tokens as far as they could be read behind those that were given, and what it cost.

    Its rows begin at position `first_position` of the text. What stands before is `before`, if that is known; it is
    borne out by the rows, unless `is_open`.
    """

    tokens: tuple[ReadToken, ...]
    length: int
    noise: float  # by the norm of its state, the strongest of all positions
    num_candidates: int
    num_jacobians: int
    given: tuple[int, ...] = ()
    beginning: BeginningStatus = BeginningStatus.NONE
    is_mismatch: bool = False  # what tokens leave is no noise, so that nothing is proven
    before: tuple[int, ...] = ()
    first_position: int = 0
    is_open: bool = False  # whether nothing that is seen depends on what stands before
    is_placed: bool = True  # whether what is seen of a token tells its position
    stopped: int | None = None  # tokens after which none agreed; those behind them are the nearest ones, if any
    nearest: NearestText | None = None  # of a text that is not proven
    factor: float = 1.0  # of everything that was seen, taken out before it was read
    why_unbound: str = ""  # why the rows do not tell that they are those of one text, where they do not

    @property
    def is_bound(self) -> bool:
        """Whether the rows tell that they are those of one text, in this order."""
        return self.is_placed and not self.why_unbound

    @property
    def num_known(self) -> int:
        """Tokens that were given or read."""
        return len(self.given) + len(self.tokens)

    @property
    def proven(self) -> bool:
        """Whether every position was read and proven, up to tokens that no state tells apart."""
        return self.num_known == self.length and all(token.proven for token in self.tokens)

    @property
    def is_exact(self) -> bool:
        """Whether these tokens stand in the rows that were seen, and no others."""
        return self.proven and all(token.certain for token in self.tokens)

    @property
    def certain(self) -> bool:
        """Whether this is the text, all of it, and no other one."""
        return self.is_exact and self.is_bound and not self.is_open


@dataclass(frozen=True)
class ScoredRows:
    """How likely every token is in the rows from `first` on, by the model's prediction and by all that is known."""

    first: int
    prior: Float[Tensor, "k vocab"]
    scores: Float[Tensor, "k vocab"]


@dataclass
class TextProgress:
    """A text while it is read: row `done` of what is seen is the next one.

    `features[i]` is what the output layer reads before it predicts the token of row i, where `is_predicted[i]`.
    `predictor` is the text behind all blocks, of which nothing is known but tokens.
    """

    seen: SeenText
    start: Continuation  # behind the tokens that were given
    continuation: Continuation
    given: tuple[int, ...]
    features: Float[Tensor, "n d"] | None
    is_predicted: Bool[Tensor, " n"]
    predictor: Continuation | None = None
    unpredicted: list[int] = field(default_factory=list)  # tokens that the predictor has not read
    tokens: list[ReadToken] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    num_candidates: int = 0
    num_jacobians: int = 0
    is_noisy: bool = False
    is_mismatch: bool = False  # whether what tokens leave is no noise
    needs_next: bool = False  # whether the first token is proven only together with the next one
    is_second_try: bool = False
    scored: ScoredRows | None = None
    window: int = 4

    @property
    def done(self) -> int:
        """The number of rows whose tokens are known."""
        return len(self.given) + len(self.tokens)

    @property
    def may_try_again(self) -> bool:
        """Whether the first token may be another one, and was not looked for together with the second yet."""
        return self.needs_next and len(self.tokens) == 1 and not self.is_second_try

    @property
    def is_proven(self) -> bool:
        """Whether every token so far is."""
        return all(token.proven for token in self.tokens)

    def add(self, *tokens: ReadToken) -> None:
        """Further tokens."""
        self.tokens += tokens
        self.unpredicted += [token.token for token in tokens]

    def predict_next(self) -> Reading[None]:
        """Let the model read the tokens that are known, and predict the next one."""
        if self.predictor is None or self.features is None or not self.unpredicted or self.done >= len(self.seen):
            return
        tokens = torch.tensor(self.unpredicted, device=self.features.device)
        said = yield RowPass(self.predictor, tokens, in_order=True)
        self.predictor = self.predictor.advance(said, len(tokens))
        self.unpredicted = []
        self.features[self.done], self.is_predicted[self.done] = said.states[-1], True
