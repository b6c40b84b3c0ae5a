"""The data inside the page: what the page's script needs to build the details of a finding, as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from unmask.attacks.table import ATTACKS
from unmask.audit.cases.case_names import full_name, is_live
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import Verdict
from unmask.channels import threat_key, threat_of
from unmask.recovery import Status
from unmask.report.case_details import is_shortened, repeat_command, specification
from unmask.report.counterparts import Counterpart, Counterparts, Effect
from unmask.report.numbers import control_in_words, format_value, leak_in_full, looked_for_in_words, scientific
from unmask.report.page import Row, judgements_by_finding, plan_of
from unmask.report.secrets import Secrets, error_traceback, reason
from unmask.safe_text import make_safe
from unmask.specs import split_text

_MAX_STOPS = 12
_PROVEN = (Status.RECOVERED.name, Status.PARTIAL.name)


class Strings:
    """Long texts that many findings share, each kept once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Where the text is in the list."""
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        """The list."""
        return list(self._places)


def page_data(audit: Audit, verdict: Verdict, folder: Path, rows: Sequence[Row], show_secrets: bool) -> dict[str, Any]:
    """Everything that the script reads. Texts are in it only if secrets are shown."""
    strings, stops, secrets = Strings(), Counterparts(verdict), Secrets(show_secrets)
    places = {finding.id: place for place, finding in enumerate(audit.findings)}
    path = plan_of(audit.manifest).get("path")
    judgements = judgements_by_finding(verdict)
    findings = [
        {
            **_details(finding, strings, show_secrets),
            "order": row.order,
            "gate": row.gate,
            "gates": [
                [make_safe(one.gate.text), one.ruling.value, strings.place(make_safe(one.why))]
                for one in judgements.get(finding.id, ())
            ],
            "stops": None if is_live(finding.case) else _stops(stops.of(finding), places),
            "command": repeat_command(path, str(folder), finding.id, show_secrets),
            **secrets.of(finding),
        }
        for finding, row in zip(audit.findings, rows, strict=True)
    ]
    keys = sorted({threat_key(finding.case) for finding in audit.findings})
    return {
        "secrets": show_secrets,
        "shortened": not show_secrets and is_shortened(path, str(folder)),
        "strings": strings.all(),
        "pieces": secrets.pieces,
        "outcomes": {outcome.name: outcome.value for outcome in Outcome},
        "meanings": {finding.status: finding.meaning for finding in audit.findings},
        "threats": {make_safe(key): asdict(threat_of(key)) for key in keys},
        "findings": findings,
    }


def as_script(document: Any) -> Markup:
    """JSON that may stand in a script element: ASCII only, and no sign that HTML or a comment could begin with."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _details(finding: Finding, strings: Strings, show_secrets: bool) -> dict[str, Any]:
    details: dict[str, Any] = {
        "id": make_safe(finding.id),
        "name": full_name(finding.case),
        "outcome": finding.outcome.name,
        "status": finding.status,
        "reason": strings.place(reason(finding, show_secrets)),
        "threat": make_safe(threat_key(finding.case)),
        "case": specification(finding.case, show_secrets),
        "metrics": _metrics(finding),
        "certificate": _certificate(finding.certificate, strings),
        "cost": [(make_safe(name).replace("_", " "), _value(value)) for name, value in finding.cost.items()],
        "run": [
            (make_safe(name), _value(value)) for name, value in finding.run.items() if show_secrets or name != "host"
        ],
        "used": strings.place(", ".join(make_safe(name, 120) for name in finding.used[:200])),
    }
    if finding.outcome is Outcome.LEAK and finding.status not in _PROVEN:
        details["note"] = strings.place("The adversary cannot prove it, but its guesses are right.")
    if sought := looked_for_in_words(finding):
        details["looked_for"] = strings.place(sought)
    if control := control_in_words(finding):
        details["control"] = strings.place(control)
    if limit := attack_limit(finding.case):
        details["limit"] = strings.place(limit)
    if finding.model_fingerprint:
        details["fingerprint"] = make_safe(finding.model_fingerprint)
    if lines := error_traceback(finding, show_secrets):
        details["traceback"] = lines
    return details


def _metrics(finding: Finding) -> list[tuple[str, str, str]]:
    return [
        (
            make_safe(name),
            format_value(name, value),
            format_value(name, finding.chance[name]) if name in finding.chance else "",
        )
        for name, value in finding.metrics.items()
    ]


def _certificate(certificate: Mapping[str, Any], strings: Strings) -> dict[str, Any] | None:
    if not certificate:
        return None
    details = certificate.get("details")
    details = details if isinstance(details, Mapping) else {}
    holds, is_tested = certificate.get("holds") is True, certificate.get("residual") is not None
    return {
        "claim": strings.place(make_safe(certificate.get("claim", ""), 2000)),
        "word": "It holds." if holds else "It does not hold." if is_tested else "There is no certificate.",
        "numbers": [
            *((name, _value(certificate.get(name))) for name in ("residual", "tolerance", "rejected")),
            *((make_safe(name).replace("_", " "), _value(value)) for name, value in details.items()),
        ],
    }


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return scientific(value) if isinstance(value, float) else make_safe(value)


def _stops(stops: Sequence[Counterpart], places: Mapping[str, int]) -> list[tuple[int, str, str]]:
    return [(places[stop.finding.id], stop.protection, _effect(stop)) for stop in stops[:_MAX_STOPS]]


def _effect(stop: Counterpart) -> str:
    match stop.effect:
        case Effect.STOPPED:
            seeds = f", in all {stop.num_seeds} seeds" if stop.num_seeds > 1 else ""
            return f"not leaked by this attack{seeds}"
        case Effect.SOMETIMES:
            return f"stopped in {stop.num_stopped} of {stop.num_seeds} seeds, which does not count as 'stopped'"
        case Effect.REDUCED:
            return f"reduced to {leak_in_full(stop.finding)}"
        case Effect.UNCLEAR:
            return "inconclusive, which does not count as 'stopped'"


def attack_limit(case: Mapping[str, Any]) -> str | None:
    """What is particular about the attack that was chosen."""
    name, _ = split_text(str(case.get("attack")))
    kind = ATTACKS.get(name)
    if kind is None:
        return None
    role = "a baseline, as published" if kind.is_baseline else "chosen by the plan"
    return f"The attack '{name}' ({role}; {kind.source}). Its limits: {kind.limits}."
