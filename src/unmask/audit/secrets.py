"""What a service keeps to itself, as text: `attention:layer=15`, `output-layer`, `random:heads=4,width=16`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unmask.errors import InputError
from unmask.protocols.spec_text import read_spec

# Name → settings with their least values, and an example.
SECRETS: Mapping[str, tuple[Mapping[str, int], str]] = {
    "attention": ({"layer": 0}, "attention:layer=15"),
    "output-layer": ({}, "output-layer"),
    "random": ({"heads": 1, "width": 1}, "random:heads=4,width=16"),
}


@dataclass(frozen=True)
class QuerySecret:
    """A secret with its settings: the heads of a layer of the model, its output layer, or heads drawn at random."""

    name: str
    settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def needs_a_model(self) -> bool:
        """Whether it is part of a model."""
        return self.name != "random"

    def __str__(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}:{given}" if given else self.name


def parse_secret(text: str) -> QuerySecret:
    """The secret that a text names."""
    name, given = read_spec("secret", text, _usage)
    least = SECRETS[name][0]
    if set(given) != set(least):
        raise InputError(f"secret '{name}': got {', '.join(given) or 'no settings'}; {_usage(name)}")
    settings = {}
    for key in least:
        value = given[key]
        if not value.isdecimal() or int(value) < least[key]:
            raise InputError(f"secret '{name}': '{key}' must be a whole number from {least[key]} on, got {value!r}")
        settings[key] = int(value)
    return QuerySecret(name, settings)


def _usage(name: str) -> str:
    if name not in SECRETS:
        examples = ", ".join(example for _, example in SECRETS.values())
        raise InputError(f"there is no secret '{name}'; for example {examples}")
    settings, example = SECRETS[name]
    return f"its settings are {', '.join(settings) or 'none'}; for example {example}"
