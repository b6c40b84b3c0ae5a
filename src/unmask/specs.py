"""Settings as text, in the one grammar of commands and plans: `name`, or `name:key=value,key=value`.

A table maps names to kinds; each kind says what its settings are and what they make. A `Spec` is a name with all its
settings, checked. Its text is canonical: two texts that mean the same give the same spec, and so the same case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from unmask.errors import InputError
from unmask.wording import did_you_mean

REQUIRED: Any = object()  # the default of a setting that must be given


def split_text(text: str) -> tuple[str, list[str]]:
    """The name and the parts `key=value` of a text, unchecked: it may come from another version."""
    name, colon, rest = (part.strip() for part in text.partition(":"))
    return name, rest.split(",") if colon else []


@dataclass(frozen=True)
class Setting:
    """A setting: what it must be, and `read`, which takes a text or a value and raises where it cannot.

    The text of a spec leaves out a setting that has its default, unless it is `always_written`.
    """

    name: str
    expected: str
    read: Callable[[Any], Any]
    default: Any = REQUIRED
    always_written: bool = False

    def __str__(self) -> str:
        default = "" if self.default in (REQUIRED, None) else f", {_write(self.default)} unless given"
        return f"{self.name} ({self.expected}{default})"


@dataclass(frozen=True)
class Kind:
    """A line of a table: an example, what it does in one sentence, what makes it, and its settings.

    `check` refuses settings that do not go together; it is called with those that were given.
    """

    example: str
    summary: str
    make: Callable[..., Any]
    settings: tuple[Setting, ...] = ()
    check: Callable[..., object] = lambda **settings: None

    @property
    def usage(self) -> str:
        """How it is written."""
        return describe_settings(self.settings, self.example)


def describe_settings(settings: Sequence[Setting], example: str) -> str:
    """What may stand behind a name."""
    listed = ", ".join(map(str, settings))
    return f"its settings are {listed}; for example {example}" if listed else "it has no settings"


@dataclass(frozen=True)
class Spec:
    """A name and its settings, which may be given as texts or as values; those left out get their defaults.

    It is checked when it is made, so that a mistake shows before anything runs. `Spec.parse(str(spec)) == spec`.
    """

    noun: ClassVar[str]
    table: ClassVar[Mapping[str, Kind]]

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    written: frozenset[str] = field(init=False, repr=False, compare=False)  # settings that were given, defaults too

    def __post_init__(self) -> None:
        if self.name not in self.table:
            examples = ", ".join(kind.example for kind in self.table.values())
            known = ", ".join(self.table)
            hint = did_you_mean(self.name, self.table)
            raise InputError(f"there is no {self.noun} '{self.name}'.{hint} Known: {known}; for example {examples}")
        known_names = {setting.name for setting in self.kind.settings}
        for key in self.settings:
            if key not in known_names:
                hint = did_you_mean(key, known_names)
                raise InputError(f"{self.noun} '{self.name}' has no setting '{key}'.{hint} Usage: {self.kind.usage}")
        settings = {each.name: self._read(each) for each in self.kind.settings}
        try:
            self.kind.check(**{name: settings[name] for name in self.settings})
        except InputError as error:
            raise InputError(f"{self.noun} '{self.name}': {error}") from None
        object.__setattr__(self, "written", frozenset(self.settings))
        object.__setattr__(self, "settings", settings)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The spec that a text names."""
        name, parts = split_text(text)
        if name not in cls.table:
            return cls(name)  # which says what there is
        settings: dict[str, str] = {}
        for part in parts:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            usage = cls.table[name].usage
            if not equals:
                raise InputError(f"{cls.noun} '{name}': expected key=value, got '{part}'; {usage}")
            if key in settings:
                raise InputError(f"{cls.noun} '{name}': '{key}' is given twice, again in '{part.strip()}'; {usage}")
            settings[key] = value
        return cls(name, settings)

    @property
    def kind(self) -> Kind:
        """Its line of the table."""
        return self.table[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return {each.name: self.settings[each.name] for each in self.kind.settings if not self._is_default(each)}

    def __str__(self) -> str:
        written = (each for each in self.kind.settings if each.always_written or not self._is_default(each))
        settings = ",".join(f"{each.name}={_write(self.settings[each.name])}" for each in written)
        return f"{self.name}:{settings}" if settings else self.name

    def __hash__(self) -> int:
        return hash(str(self))

    def _is_default(self, setting: Setting) -> bool:
        return setting.default is not REQUIRED and self.settings[setting.name] == setting.default

    def _read(self, setting: Setting) -> Any:
        if setting.name not in self.settings:
            if setting.default is REQUIRED:
                raise InputError(f"{self.noun} '{self.name}' needs '{setting.name}'; {self.kind.usage}")
            return setting.default
        value = self.settings[setting.name]
        if value is None and setting.default is None:
            return None
        try:
            return setting.read(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise InputError(
                f"{self.noun} '{self.name}': '{setting.name}' must be {setting.expected}, got {value!r}; "
                f"{self.kind.usage}"
            ) from None


# ---- settings of each type


def number(
    name: str, expected: str = "a number", is_allowed: Callable[[float], bool] = math.isfinite, **options: Any
) -> Setting:
    """A number of a range."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not is_allowed(float(value)):
            raise ValueError(value)
        return float(value)

    return Setting(name, expected, read, **options)


def whole_number(name: str, least: int, most: float = math.inf, **options: Any) -> Setting:
    """A whole number of a range."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not float(value).is_integer() or not least <= float(value) <= most:
            raise ValueError(value)
        return int(float(value))

    end = "on" if most >= 2**62 else f"to {most:g}"
    return Setting(name, f"a whole number from {least} {end}", read, **options)


def flag(name: str, **options: Any) -> Setting:
    """True or false."""
    return Setting(name, "true or false", lambda value: {"true": True, "false": False}[str(value).lower()], **options)


def one_of(name: str, words: Sequence[str], **options: Any) -> Setting:
    """One of a few words."""
    return Setting(name, f"one of {', '.join(words)}", lambda value: words[words.index(value)], **options)


def names(name: str, expected: str, **options: Any) -> Setting:
    """Several names, joined by +."""

    def read(value: Any) -> tuple[str, ...]:
        parts = tuple(value.split("+") if isinstance(value, str) else value)
        if not parts or not all(isinstance(part, str) and part and part.strip() == part for part in parts):
            raise ValueError(value)
        if any(sign in part for part in parts for sign in ",+"):
            raise ValueError(value)
        return parts

    return Setting(name, expected, read, **options)


def _write(value: Any) -> str:
    """A setting's value as a text that is read back exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(value)
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
