"""Protocols as text, for the command line and for plans: `fedavg:local_steps=4,learning_rate=0.01`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts
from unmask.protocols.dpsgd import PrivateUpdate, check_dpsgd, observe_dpsgd
from unmask.protocols.fedavg import check_fedavg, observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.lora import observe_lora
from unmask.protocols.spec_text import read_spec


@dataclass(frozen=True)
class ProtocolKind:
    """A line of the table: what the client does, and the settings that a text may give, with how they are read."""

    example: str
    summary: str
    observe: Callable[..., GradientEvidence | PrivateUpdate]
    settings: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    check: Callable[..., None] = lambda **settings: None  # refuses settings that do not go together


_NAMES: Mapping[Any, str] = {int: "a whole number", float: "a number", str: "a word"}

PROTOCOLS: Mapping[str, ProtocolKind] = {
    "fedsgd": ProtocolKind("fedsgd", "one gradient of the whole batch", observe_gradients),
    "fedavg": ProtocolKind(
        "fedavg:local_steps=4,learning_rate=0.01",
        "local training; weights after minus weights before",
        observe_fedavg,
        {
            "local_steps": int,
            "epochs": int,
            "batch_size": int,
            "optimizer": str,
            "learning_rate": float,
            "weight_decay": float,
            "momentum": float,
            "max_grad_norm": float,
        },
        check_fedavg,
    ),
    "dpsgd": ProtocolKind(
        "dpsgd:noise_multiplier=0.5,max_grad_norm=1,dataset_size=1000",
        "each text's gradient clipped, noise added (Opacus)",
        observe_dpsgd,
        {
            "noise_multiplier": float,
            "max_grad_norm": float,
            "sample_rate": float,
            "dataset_size": int,
            "steps": int,
            "delta": float,
        },
        check_dpsgd,
    ),
    "lora": ProtocolKind(
        "lora:rank=8",
        "gradients of low-rank adapters only (PEFT)",
        observe_lora,
        {"rank": int, "alpha": float, "dropout": float, "steps": int, "learning_rate": float},
    ),
}


@dataclass(frozen=True)
class Protocol:
    """A protocol with its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: Model, texts: Texts, **options: Any) -> PrivateUpdate:
        """The update that the server sees, and the privacy budget that it spent (infinite without DP-SGD)."""
        update = PROTOCOLS[self.name].observe(model, texts, **self.settings, **options)
        return update if isinstance(update, PrivateUpdate) else PrivateUpdate(update, float("inf"), 0.0)

    def __str__(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}:{given}" if given else self.name


def parse_protocol(text: str) -> Protocol:
    """The protocol that a text names: a name and, after a colon, settings as key=value with commas between them."""
    name, given = read_spec("protocol", text, _usage)
    kinds = PROTOCOLS[name].settings
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if key not in kinds:
            raise InputError(f"protocol '{name}': cannot take '{key}={value}'; {_usage(name)}")
        try:
            settings[key] = kinds[key](value)
        except ValueError:
            raise InputError(
                f"protocol '{name}': '{key}' must be {_NAMES[kinds[key]]}, got {value!r}; {_usage(name)}"
            ) from None
    try:
        PROTOCOLS[name].check(**settings)
    except InputError as error:
        raise InputError(f"protocol '{name}': {error}") from None
    return Protocol(name, {key: settings[key] for key in kinds if key in settings})  # one text for one protocol


def _usage(name: str) -> str:
    if name not in PROTOCOLS:
        examples = ", ".join(kind.example for kind in PROTOCOLS.values())
        raise InputError(f"there is no protocol '{name}'; for example {examples}")
    kind = PROTOCOLS[name]
    return f"its settings are {', '.join(kind.settings) or 'none'}; for example {kind.example}"
