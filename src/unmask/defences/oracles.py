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
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

import torch

from unmask.defences.table import Setting, written
from unmask.errors import InputError, UnmaskError
from unmask.evidence.oracles import Answers, FunctionOracle, Oracle, Refused, Sequences
from unmask.protocols.spec_text import read_spec

_ROUNDING = 1e-12  # relative: a token that was scaled to the bound exactly may be longer by a rounding


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not float(value).is_integer():
        raise ValueError(value)
    return int(float(value))


def _flag(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


# How a field of each type is described and read.
_KINDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("a whole number", _whole),
    "float": ("a number", float),
    "bool": ("true or false", _flag),
}


@dataclass(frozen=True)
class _Defended(ABC):
    """An oracle behind a defence; ledgers tell its answers from those without, by its name."""

    kind: ClassVar[str]
    example: ClassVar[str]
    oracle: Oracle

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """What can be set, read off the fields."""
        names = [entry for entry in fields(cls) if entry.init and entry.name != "oracle"]
        defaults = {entry.name: None if entry.default is MISSING else entry.default for entry in names}
        return tuple(Setting(entry.name, *_KINDS[str(entry.type)], defaults[entry.name]) for entry in names)

    @property
    def text(self) -> str:
        """The defence as `parse_oracle_defence` reads it."""
        values = [(setting, getattr(self, setting.name)) for setting in self.settings()]
        given = [f"{setting.name}={written(value)}" for setting, value in values if value != setting.default]
        return f"{self.kind}:{','.join(given)}" if given else self.kind

    @abstractmethod
    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers as they are handed out."""

    @property
    def name(self) -> str:
        """Who answers, behind which defences."""
        return f"{self.oracle.name} behind {self.text}"


@dataclass(frozen=True)
class _ChangedAnswers(_Defended):
    """Every question is answered; what is answered is changed."""

    @abstractmethod
    def changed(self, answers: Answers) -> Answers:
        """What is handed out instead of these answers."""

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers as they are handed out."""
        for places, answers in self.oracle.pieces(sequences):
            yield places, self.changed(answers.double())


@dataclass(frozen=True)
class RoundedOracle(_ChangedAnswers):
    """Answers rounded to so many decimals.

    Stops: nothing, where tokens may be long; (u, y) → (R·u, y/R) keeps every score and multiplies the answer by R, so
    the grid becomes finer by R. Together with a bound on norms it costs the asker digits: see docs/queries.md.
    """

    kind = "round"
    example = "round:decimals=2"
    decimals: int

    def __post_init__(self) -> None:
        if not 0 <= self.decimals <= 15:
            raise InputError(f"decimals must be a whole number from 0 to 15, got {self.decimals}")

    def changed(self, answers: Answers) -> Answers:
        """The nearest multiples of 10^−decimals."""
        return answers.round(decimals=self.decimals)


@dataclass(frozen=True)
class NoisyOracle(_ChangedAnswers):
    """Gaussian noise of standard deviation sigma on every answer, new each time, repeated questions included.

    Stops: nothing, where tokens may be long (see `RoundedOracle`) or where questions may be repeated: N answers
    average to sigma/√N. See docs/queries.md.
    """

    kind = "noise"
    example = "noise:sigma=1e-3"
    sigma: float
    seed: int = 0
    _generator: torch.Generator = field(default_factory=torch.Generator, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise InputError(f"sigma must be a finite number from 0 on, got {self.sigma}")
        self._generator.manual_seed(self.seed)

    def changed(self, answers: Answers) -> Answers:
        """The answers with noise that depends on the seed and on how many came before."""
        noise = torch.randn(answers.shape, generator=self._generator, dtype=torch.float64)
        return answers + self.sigma * noise.to(answers.device)


@dataclass(frozen=True)
class SignOracle(_ChangedAnswers):
    """Only the signs of answers: −1, 0 or 1.

    Stops: the scale of v, which no sign tells. W and the direction of v of one head cost one question a bit, by
    bisection. See docs/queries.md.
    """

    kind = "sign"
    example = "sign"

    def changed(self, answers: Answers) -> Answers:
        """The signs."""
        return answers.sign()


@dataclass(frozen=True)
class TopKOracle(_ChangedAnswers):
    """The k largest entries of every vector; the others are 0.

    Stops: readers that take a vector as it is; an entry can be brought to the top by choosing tokens, so the others
    are hidden for that question only. Needs vector answers. See docs/queries.md.
    """

    kind = "topk"
    example = "topk:k=5"
    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"k must be 1 or more, got {self.k}")

    def changed(self, answers: Answers) -> Answers:
        """The k largest entries in their places."""
        if answers.ndim != 2:
            raise InputError(
                f"{self.oracle.name} answers with one number, so nothing can be left out; drop '{self.text}'"
            )
        largest = answers.topk(min(self.k, answers.shape[1]), dim=1)
        return torch.zeros_like(answers).scatter(1, largest.indices, largest.values)


@dataclass(frozen=True)
class BoundedNormOracle(_Defended):
    """Sequences that hold a token longer than max_norm are refused, and with them the whole batch.

    Stops: making noise and rounding small by long tokens; both need it. It also stops
    heads from being turned off one by one: four and more were not recovered, one to three are. See docs/queries.md.
    """

    kind = "norm"
    example = "norm:max_norm=50"
    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise InputError(f"max_norm must be above 0, got {self.max_norm}")

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
class RateLimitedOracle(_Defended):
    """At most so many queries in any span of so many seconds; more of them wait, or are refused (`wait=False`).

    Stops: nothing. It sets the price in time: d + d² questions at 10 a second are a day at width 930. See
    docs/queries.md.
    """

    kind = "rate"
    example = "rate:queries=100,seconds=60"
    queries: int
    seconds: float
    wait: bool = True
    _granted: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.queries < 1 or not 0 < self.seconds < math.inf:
            raise InputError(f"queries and seconds must be above 0, got {self.queries} and {self.seconds}")

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


# ---- as text


_WRAPPERS = (RoundedOracle, NoisyOracle, BoundedNormOracle, TopKOracle, RateLimitedOracle, SignOracle)
ORACLE_DEFENCES: Mapping[str, type[_Defended]] = {wrapper.kind: wrapper for wrapper in _WRAPPERS}


def nobody() -> Oracle:
    """An oracle to look at a defence by itself, before there is a service."""
    return FunctionOracle(torch.zeros_like, "nobody")


@dataclass(frozen=True)
class OracleDefence:
    """A defence of a service with its settings: oracle in, oracle out. `parse_oracle_defence(str(d)) == d`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {setting.name: setting for setting in _wrapper(self.name).settings()}
        taken = {name: setting.default for name, setting in known.items() if setting.default is not None}
        for key, value in self.settings.items():
            try:
                taken[key] = known[key].take(value)
            except (ValueError, TypeError, KeyError, OverflowError):
                raise InputError(f"defence '{self.name}' cannot take {key}={value!r}; {_usage(self.name)}") from None
        if len(taken) < len(known):
            missing = next(name for name in known if name not in taken)
            raise InputError(f"defence '{self.name}' needs '{missing}'; {_usage(self.name)}")
        object.__setattr__(self, "settings", taken)
        self(nobody())

    def __call__(self, oracle: Oracle) -> Oracle:
        """The service as its users see it."""
        return _wrapper(self.name)(oracle, **self.settings)

    def __str__(self) -> str:
        return _wrapper(self.name)(nobody(), **self.settings).text

    def __hash__(self) -> int:
        return hash(str(self))


def parse_oracle_defence(text: str) -> OracleDefence:
    """The defence that a text names, written as those of updates are: `round:decimals=2`."""
    return OracleDefence(*read_spec("defence", text, _usage))


def _wrapper(name: str) -> type[_Defended]:
    if name not in ORACLE_DEFENCES:
        examples = ", ".join(wrapper.example for wrapper in ORACLE_DEFENCES.values())
        raise InputError(f"there is no defence '{name}' of a service; for example {examples}")
    return ORACLE_DEFENCES[name]


def _usage(name: str) -> str:
    settings = ", ".join(map(str, _wrapper(name).settings())) or "none"
    return f"its settings are {settings}; for example {_wrapper(name).example}"
