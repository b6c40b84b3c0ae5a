"""The threat model of a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unmask.attacks.table import ATTACKS
from unmask.channels import CHANNELS, LIVE_FEDERATION, UNKNOWN_THREAT, Threat
from unmask.specs import split_text

_LIVE = "federation"


def threat_key(case: Mapping[str, Any]) -> str:
    """The threat model of a case, by name."""
    if case.get("source") == "flower":
        return _LIVE
    return str(case.get("channel", ""))


def threat_of(key: str) -> Threat:
    """The threat model of that name; a channel of a newer version gets one that claims nothing."""
    if key == _LIVE:
        return LIVE_FEDERATION
    return CHANNELS[key].threat if key in CHANNELS else UNKNOWN_THREAT


def attack_limit(case: Mapping[str, Any]) -> str | None:
    """What is particular about the attack that was chosen."""
    name, _ = split_text(str(case.get("attack")))
    kind = ATTACKS.get(name)
    if kind is None:
        return None
    role = "a baseline, as published" if kind.is_baseline else "chosen by the plan"
    return f"The attack '{name}' ({role}; {kind.source}). Its limits: {kind.limits}."
