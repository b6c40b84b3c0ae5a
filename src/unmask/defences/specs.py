"""Defences as text, for the command line and for plans: `noise:sigma=1e-4,relative=true`.

Secure aggregation and larger batches have no such text: they need several clients (`--clients`) or other texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unmask.defences.table import DEFENCES, DefenceKind, Setting, written
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.protocols.spec_text import read_spec


@dataclass(frozen=True)
class Defence:
    """A defence with its settings: evidence in, evidence out. Its text gives it back: `parse_defence(str(d)) == d`.

    It is checked when it is made, so that a mistake shows before any gradient is computed. Settings may be texts or
    values; those that are left out get their defaults.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = _kind(self.name)
        unknown = [key for key in self.settings if key not in {setting.name for setting in kind.settings}]
        if unknown:
            raise InputError(f"defence '{self.name}' has no setting '{unknown[0]}'; {_usage(kind)}")
        taken = {setting.name: _taken(self.name, setting, self.settings) for setting in kind.settings}
        object.__setattr__(self, "settings", taken)

    def __call__(self, evidence: GradientEvidence, generator: torch.Generator) -> GradientEvidence:
        """The update as the server sees it; a defence without chance leaves the generator alone."""
        return DEFENCES[self.name].apply(evidence, generator, **self.settings)

    def __str__(self) -> str:
        defaults = {setting.name: setting.default for setting in DEFENCES[self.name].settings}
        given = [f"{key}={written(value)}" for key, value in self.settings.items() if value != defaults[key]]
        return f"{self.name}:{','.join(given)}" if given else self.name

    def __hash__(self) -> int:
        return hash(str(self))


def parse_defence(text: str) -> Defence:
    """The defence that a text names: a name and, after a colon, settings as key=value with commas between them."""
    return Defence(*read_spec("defence", text, lambda name: _usage(_kind(name))))


def describe_defences() -> list[tuple[str, str, str]]:
    """Name, example and promise of every defence, in the order of the table."""
    return [(name, kind.example, kind.promise) for name, kind in DEFENCES.items()]


def _kind(name: str) -> DefenceKind:
    if name not in DEFENCES:
        examples = ", ".join(kind.example for kind in DEFENCES.values())
        raise InputError(f"there is no defence '{name}'; known ones are {', '.join(DEFENCES)}; for example {examples}")
    return DEFENCES[name]


def _taken(name: str, setting: Setting, given: Mapping[str, Any]) -> Any:
    usage = _usage(DEFENCES[name])
    if setting.name not in given:
        if setting.default is None:
            raise InputError(f"defence '{name}' needs '{setting.name}'; {usage}")
        return setting.default
    value = given[setting.name]
    try:
        return setting.take(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InputError(
            f"defence '{name}': '{setting.name}' must be {setting.expected}, got {value!r}; {usage}"
        ) from None


def _usage(kind: DefenceKind) -> str:
    settings = ", ".join(str(setting) for setting in kind.settings)
    return f"its settings are {settings}; for example {kind.example}" if settings else "it has no settings"
