"""The axes of a plan: what each list of a group may hold, and what it holds when nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unmask.attacks.table import Attack, Secret, attacks_of
from unmask.audit.secrets import parse_secret
from unmask.defences.oracles import parse_oracle_defence
from unmask.defences.table import parse_defence
from unmask.errors import InputError
from unmask.evidence.gradients import Task
from unmask.evidence.outputs import Site
from unmask.protocols.table import parse_protocol

NO_DEFENCE = "none"
DEFAULT = "default"


@dataclass(frozen=True)
class Axis:
    """A list of a group: the key that it gives a case, how an entry is read, and the entries when none are given."""

    key: str
    read: Callable[[Any], Any]
    default: tuple[Any, ...] = ()  # empty: the list must be given


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"expected a name, got {value!r}")
    return value


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise InputError(f"expected one of {', '.join(allowed)}, got {value!r}")
        return str(value)

    return read


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"expected a whole number from {least} on, got {value!r}")
        return value

    return read


def _task(value: Any) -> str:
    return _one_of(DEFAULT, *(task.value for task in Task))(
        value.replace("-", "_") if isinstance(value, str) else value
    )


def _attack(channel: str, *secrets: Secret) -> Callable[[Any], str]:
    """'default', or an attack of the table that findings of the channel can score."""
    known = [DEFAULT, *attacks_of(channel, *secrets)]

    def read(value: Any) -> str:
        if value == DEFAULT:
            return DEFAULT
        attack = Attack.parse(_name(value))
        if attack.name not in known:
            raise InputError(f"expected one of {', '.join(known)}, got {value!r}")
        return str(attack)

    return read


def _layer(value: Any) -> int | str:
    return "last" if value == "last" else _whole(0)(value)


def _defences(parse: Callable[[str], Any]) -> Callable[[Any], list[str]]:
    """A defence, 'none', or a list of defences that are applied one after the other; each in its canonical text."""

    def read(value: Any) -> list[str]:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"expected a defence as text, or a list of them, got {value!r}")
        return [str(parse(text)) for text in texts if text != NO_DEFENCE]

    return read


_MODELS = Axis("model", _name)
_DATA = Axis("data", _name, ("invented",))
_DTYPES = Axis("dtype", _one_of("float32", "bfloat16", "float64"), ("float32",))
_SEEDS = Axis("seed", _whole(0), (0,))
_DEFENCES = Axis("defences", _defences(parse_defence), (NO_DEFENCE,))

AXES: Mapping[str, Mapping[str, Axis]] = {
    "gradients": {
        "models": _MODELS,
        "dtypes": _DTYPES,
        "data": _DATA,
        "batch_sizes": Axis("batch_size", _whole(1), (4,)),
        "tasks": Axis("task", _task, (DEFAULT,)),
        "protocols": Axis("protocol", lambda value: str(parse_protocol(_name(value))), ("fedsgd",)),
        "clients": Axis("clients", _whole(1), (1,)),
        "defences": _DEFENCES,
        "attacks": Axis("attack", _attack("gradients", Secret.TEXTS, Secret.TOKENS), (DEFAULT,)),
        "seeds": _SEEDS,
    },
    "outputs": {
        "models": _MODELS,
        "dtypes": _DTYPES,
        "data": _DATA,
        "batch_sizes": Axis("batch_size", _whole(1), (1,)),
        "layers": Axis("layer", _layer, ("last",)),
        "sites": Axis("site", _one_of(*(site.value for site in Site)), (Site.STREAM.value,)),
        "defences": _DEFENCES,
        "attacks": Axis("attack", _attack("outputs", Secret.TEXTS, Secret.TOKENS), (DEFAULT,)),
        "seeds": _SEEDS,
    },
    "queries": {
        "models": Axis("model", lambda value: value if value == "" else _name(value), ("",)),
        "secrets": Axis("secret", lambda value: str(parse_secret(_name(value)))),
        "defences": Axis("defences", _defences(parse_oracle_defence), (NO_DEFENCE,)),
        "attacks": Axis("attack", _attack("queries", Secret.HEADS, Secret.OUTPUT_LAYER), (DEFAULT,)),
        "seeds": _SEEDS,
    },
}
