"""An axis of a plan: what a list of a group may hold, and what it holds when nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unmask.attacks.table import DEFAULT, Secret, parse_attack
from unmask.defences.table import parse_defence
from unmask.errors import InputError
from unmask.wording import did_you_mean

NO_DEFENCE = "none"
MODEL_LENGTH = "model"  # texts are as long as the model takes


@dataclass(frozen=True)
class Axis:
    """A list of a group: the key that it gives a case, how an entry is read, and the entries when none are given.

    A case holds the key of an axis that `is_optional` only where its entry is another than the default.
    """

    key: str
    read: Callable[[Any], Any]
    default: tuple[Any, ...] = ()  # empty: the list must be given
    is_optional: bool = False

    def is_left_out(self, entry: Any) -> bool:
        """Whether a case does not hold the entry."""
        return self.is_optional and (entry,) == self.default


def read_name(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"expected a name, got {value!r}")
    return value


def one_of(*allowed: str) -> Callable[[Any], str]:
    """One of some texts."""

    def read(value: Any) -> str:
        if value not in allowed:
            raise InputError(f"expected one of {', '.join(allowed)}, got {value!r}.{did_you_mean(value, allowed)}")
        return str(value)

    return read


def whole_number(least: int) -> Callable[[Any], int]:
    """A whole number from `least` on."""

    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"expected a whole number from {least} on, got {value!r}")
        return value

    return read


def read_max_length(value: Any) -> int | str:
    """A number of tokens that texts are cut to, or 'model'."""
    return MODEL_LENGTH if value == MODEL_LENGTH else whole_number(1)(value)


def attack_axis(channel: str, *secrets: Secret) -> Callable[[Any], str]:
    """'default', or an attack of the table that findings of the channel can score."""
    return lambda value: str(parse_attack(read_name(value), channel, *secrets) or DEFAULT)


def list_of_defences(parse: Callable[[str], Any]) -> Callable[[Any], list[str]]:
    """A defence, 'none', or a list of defences that are applied one after the other; each in its canonical text."""

    def read(value: Any) -> list[str]:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"expected a defence as text, or a list of them, got {value!r}")
        return [str(parse(text)) for text in texts if text != NO_DEFENCE]

    return read


MODELS = Axis("model", read_name)
DATA = Axis("data", read_name, ("invented",))
DTYPES = Axis("dtype", one_of("float32", "bfloat16", "float64"), ("float32",))
MAX_LENGTHS = Axis("max_length", read_max_length, (MODEL_LENGTH,), is_optional=True)
EFFORTS = Axis("effort", whole_number(1), (1,), is_optional=True)
SEEDS = Axis("seed", whole_number(0), (0,))
DEFENCES = Axis("defences", list_of_defences(parse_defence), (NO_DEFENCE,))
