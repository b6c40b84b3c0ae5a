"""Defences of a service: oracle in, oracle out. Each card says what it stops; docs/queries.md has what was measured.

As text, for the command line and for plans: `round:decimals=2`.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.errors import InputError, UnmaskError
from unmask.evidence.oracles import Answers, FunctionOracle, Oracle, Refused, Sequences
from unmask.specs import Kind, Spec, flag, number, whole_number

_ROUNDING = 1e-12  # relative: a token that was scaled to the bound exactly may be longer by a rounding


@dataclass(frozen=True)
class _DefendedOracle(ABC):
    """An oracle behind a defence; ledgers tell its answers from those without, by its name."""

    kind: ClassVar[str]
    oracle: Oracle

    def __post_init__(self) -> None:
        self.spec  # noqa: B018 (settings are checked where it is made)

    @property
    def spec(self) -> OracleDefence:
        """The defence by itself."""
        settings = (entry.name for entry in fields(self) if entry.init and entry.name != "oracle")
        return OracleDefence(self.kind, {name: getattr(self, name) for name in settings})

    @abstractmethod
    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers as they are handed out."""

    @property
    def name(self) -> str:
        """Who answers, behind which defences."""
        return f"{self.oracle.name} behind {self.spec}"


@dataclass(frozen=True)
class ChangedAnswers(_DefendedOracle):
    """Every question is answered; what is answered is changed."""

    @abstractmethod
    def change_answers(self, answers: Answers) -> Answers:
        """What is handed out instead of these answers."""

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers as they are handed out."""
        for places, answers in self.oracle.pieces(sequences):
            yield places, self.change_answers(answers.double())


@dataclass(frozen=True)
class RoundedOracle(ChangedAnswers):
    """Answers rounded to so many decimals.

    Stops: nothing, where tokens may be long; (u, y) → (R·u, y/R) keeps every score and multiplies the answer by R, so
    the grid becomes finer by R. Together with a bound on norms it costs the asker digits: see docs/queries.md.
    """

    kind = "round"
    decimals: int

    def change_answers(self, answers: Answers) -> Answers:
        """The nearest multiples of 10^−decimals."""
        return answers.round(decimals=self.decimals)


@dataclass(frozen=True)
class NoisyOracle(ChangedAnswers):
    """Gaussian noise of standard deviation sigma on every answer, new each time, repeated questions included.

    Stops: nothing, where tokens may be long (see `RoundedOracle`) or where questions may be repeated: N answers
    average to sigma/√N. See docs/queries.md.
    """

    kind = "noise"
    sigma: float
    seed: int = 0
    _generator: torch.Generator = field(default_factory=torch.Generator, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._generator.manual_seed(self.seed)

    def change_answers(self, answers: Answers) -> Answers:
        """The answers with noise that depends on the seed and on how many came before."""
        noise = torch.randn(answers.shape, generator=self._generator, dtype=torch.float64)
        return answers + self.sigma * noise.to(answers.device)


@dataclass(frozen=True)
class SignOracle(ChangedAnswers):
    """Only the signs of answers: −1, 0 or 1.

    Stops: the scale of v, which no sign tells. W and the direction of v of one head cost one question a bit, by
    bisection. See docs/queries.md.
    """

    kind = "sign"

    def change_answers(self, answers: Answers) -> Answers:
        """The signs."""
        return answers.sign()


@dataclass(frozen=True)
class TopKOracle(ChangedAnswers):
    """The k largest entries of every vector; the others are 0.

    Stops: readers that take a vector as it is; an entry can be brought to the top by choosing tokens, so the others
    are hidden for that question only. Needs vector answers. See docs/queries.md.
    """

    kind = "topk"
    k: int

    def change_answers(self, answers: Answers) -> Answers:
        """The k largest entries in their places."""
        if answers.ndim != 2:
            raise InputError(
                f"{self.oracle.name} answers with one number, so nothing can be left out; drop '{self.spec}'"
            )
        largest = answers.topk(min(self.k, answers.shape[1]), dim=1)
        return torch.zeros_like(answers).scatter(1, largest.indices, largest.values)


@dataclass(frozen=True)
class BoundedNormOracle(_DefendedOracle):
    """Sequences that hold a token longer than max_norm are refused, and with them the whole batch.

    Stops: making noise and rounding small by long tokens; both need it. It also stops
    heads from being turned off one by one: four and more were not recovered, one to three are. See docs/queries.md.
    """

    kind = "norm"
    max_norm: float

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers, unless one token is too long; then none is asked for."""
        norms = torch.linalg.vector_norm(sequences.double(), dim=-1)
        # Written so that a token that is not a number is refused as well.
        is_short = norms <= self.max_norm * (1 + _ROUNDING)
        if not is_short.all():
            raise Refused(
                f"a token has the norm {float(norms[~is_short].max()):.4g}; tokens up to {self.max_norm:.4g} are taken"
            )
        yield from self.oracle.pieces(sequences)


class RateLimited(UnmaskError):  # noqa: N818 (as statuses are named)
    """Too many questions for the moment."""


@dataclass(frozen=True)
class RateLimitedOracle(_DefendedOracle):
    """At most so many queries in any span of so many seconds; more of them wait, or are refused (`wait=False`).

    Stops: nothing. It sets the price in time: d + d² questions at 10 a second are a day at width 930. See
    docs/queries.md.
    """

    kind = "rate"
    queries: int
    seconds: float
    wait: bool = True
    _granted: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers, as many at once as are granted."""
        start = 0
        while start < len(sequences):
            num_granted, seconds_left = self._grant(len(sequences) - start)
            if num_granted == 0 and not self.wait:
                raise RateLimited(
                    f"{self.queries} queries in {self.seconds:g} s are answered, and those are used up; ask again in "
                    f"{seconds_left:.1f} s: what was answered is kept"
                )
            if num_granted == 0:
                time.sleep(seconds_left)
                continue
            for places, answers in self.oracle.pieces(sequences[start : start + num_granted]):
                yield [start + place for place in places], answers
            start += num_granted

    def _grant(self, num_wanted: int) -> tuple[int, float]:
        """How many of these may be asked now, and where none, after how many seconds to come back."""
        with self._lock:
            now = time.monotonic()
            while self._granted and self._granted[0][0] <= now - self.seconds:
                self._granted.popleft()
            num_granted = min(num_wanted, self.queries - sum(count for _, count in self._granted))
            if num_granted == 0:
                return 0, self._granted[0][0] + self.seconds - now
            self._granted.append((now, num_granted))
            return num_granted, 0.0


# ---- the table


@dataclass(frozen=True)
class AnswerDefenceKind(Kind):
    """A line of the table; `changes_logits`: it works on the logits of a language model as well."""

    changes_logits: bool = False
    needs_vectors: bool = False


_POSITIVE = "a finite number above 0", lambda value: 0 < value < math.inf
ORACLE_DEFENCES: Mapping[str, AnswerDefenceKind] = {
    "round": AnswerDefenceKind(
        "round:decimals=2",
        "answers are rounded to so many decimals",
        RoundedOracle,
        (whole_number("decimals", 0, 15),),
        changes_logits=True,
    ),
    "noise": AnswerDefenceKind(
        "noise:sigma=1e-3",
        "Gaussian noise on every answer, new each time",
        NoisyOracle,
        (number("sigma", "a finite number from 0 on", lambda v: 0 <= v < math.inf), whole_number("seed", 0, default=0)),
        changes_logits=True,
    ),
    "norm": AnswerDefenceKind(
        "norm:max_norm=50",
        "sequences with a longer token are refused",
        BoundedNormOracle,
        (number("max_norm", *_POSITIVE),),
    ),
    "topk": AnswerDefenceKind(
        "topk:k=5",
        "only the k largest entries of a vector are answered; the others are zero",
        TopKOracle,
        (whole_number("k", 1),),
        needs_vectors=True,
    ),
    "rate": AnswerDefenceKind(
        "rate:queries=100,seconds=60",
        "at most so many queries in so many seconds; more of them wait, or are refused",
        RateLimitedOracle,
        (whole_number("queries", 1), number("seconds", *_POSITIVE), flag("wait", default=True)),
    ),
    "sign": AnswerDefenceKind("sign", "only the signs of answers", SignOracle),
}


class OracleDefence(Spec):
    """A defence of a service with its settings: oracle in, oracle out."""

    noun: ClassVar[str] = "defence of a service"
    table: ClassVar[Mapping[str, AnswerDefenceKind]] = ORACLE_DEFENCES

    def __call__(self, oracle: Oracle) -> Oracle:
        """The service as its users see it."""
        defended: Oracle = self.kind.make(oracle, **self.settings)
        return defended


def parse_oracle_defence(text: str) -> OracleDefence:
    """The defence of a service that a text names, written as those of updates are: `round:decimals=2`."""
    return OracleDefence.parse(text)


LogitFunction = Callable[[Int[Tensor, "b n"]], Float[Tensor, "b vocab"]]


def defend_logits(function: LogitFunction, defence: OracleDefence) -> LogitFunction:
    """The logits as a service hands them out behind a defence."""
    if not ORACLE_DEFENCES[defence.name].changes_logits:
        known = " and ".join(f"'{name}'" for name, kind in ORACLE_DEFENCES.items() if kind.changes_logits)
        raise InputError(f"the defence '{defence}' does not apply to logits; {known} do")
    defended = defence(FunctionOracle(function, "logits"))
    assert isinstance(defended, ChangedAnswers)  # as the table says
    return lambda tokens: defended.change_answers(function(tokens).double())
