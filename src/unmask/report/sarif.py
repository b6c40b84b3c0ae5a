"""The report as SARIF 2.1.0. Every result stands at the line of the plan that its case comes from.

GitHub refuses a whole file if one result has no physical location, so each has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import MANIFEST, Audit
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import FAILED, Judgement, Verdict
from unmask.report.numbers import leak_in_words
from unmask.report.page import judgements_by_finding, missing_cases, plan_of
from unmask.report.secrets import reason
from unmask.safe_text import make_safe

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME = "https://github.com/unmask-audit/unmask"
LEAK, UNCLEAR, FAILURE, MISSING = "leak-without-gate", "inconclusive", "error", "not-run"
_RULES: Mapping[str, str] = {
    LEAK: "A case leaks, and the plan sets no gate on it.",
    UNCLEAR: "The attack did not apply or did not finish. Nothing is known.",
    FAILURE: "A case ended in an error, so nothing is known about it.",
    MISSING: "A planned case was not run yet.",
}


def render_sarif(audit: Audit, verdict: Verdict, folder: Path) -> str:
    """Error: a gate is crossed; warning: not known; note: a leak under no gate. Gates that held give no result."""
    judgements = judgements_by_finding(verdict)
    results = [result for finding in audit.findings for result in _results(finding, judgements.get(finding.id, ()))]
    results += [(MISSING, "warning", f"{_RULES[MISSING]} {name}", case_id) for case_id, name in missing_cases(audit)]
    gates = dict.fromkeys(make_safe(judgement.gate.text) for judgement in verdict.judgements)
    rules = {
        **{gate: f"The plan does not accept a finding that breaks '{gate}'." for gate in gates},
        **{name: _RULES[name] for name, *_ in results if name in _RULES},
    }
    places = {name: place for place, name in enumerate(rules)}
    lines = {make_safe(case["id"]): case.get("line") for case in audit.planned}
    address = _address(audit)
    document = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "unmask",
                        "version": make_safe(audit.manifest.get("unmask", "unknown")),
                        "informationUri": _HOME,
                        "rules": [_rule(name, text) for name, text in rules.items()],
                    }
                },
                "automationDetails": {"id": "unmask/"},
                "invocations": [{"executionSuccessful": verdict.exit_code != FAILED, "exitCode": verdict.exit_code}],
                "columnKind": "unicodeCodePoints",
                "results": [
                    _result(name, places[name], level, text, case_id, address, lines.get(case_id))
                    for name, level, text, case_id in results
                ],
            }
        ],
    }
    return json.dumps(document, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def _results(finding: Finding, judgements: Sequence[Judgement]) -> list[tuple[str, str, str, str]]:
    """Rule, level, message and id for whatever somebody should look at."""
    name, case_id, why = full_name(finding.case), make_safe(finding.id), reason(finding)
    measured = f"{name}: {finding.outcome.value}, {leak_in_words(finding)}. {why}"
    results = []
    for judgement in judgements:
        gate = make_safe(judgement.gate.text)
        if judgement.ruling is Ruling.CROSSED:
            results.append((gate, "error", f"The gate '{gate}' is crossed. {measured}", case_id))
        elif judgement.ruling is Ruling.INCONCLUSIVE:
            open_point = f"The gate '{gate}' is inconclusive: {make_safe(judgement.why)}."
            text = f"{open_point} {name}: {why}"
            results.append((gate, "warning", text, case_id))
    if judgements:
        return results
    if finding.outcome is Outcome.LEAK:
        return [(LEAK, "note", measured, case_id)]
    if finding.outcome is Outcome.NO_LEAK:
        return []
    rule = FAILURE if finding.outcome is Outcome.ERROR else UNCLEAR
    return [(rule, "warning", f"{_RULES[rule]} {name}: {why}", case_id)]


def _rule(name: str, text: str) -> dict[str, Any]:
    return {
        "id": name,
        "name": "".join(part.capitalize() for part in name.replace("-", " ").split() if part.isalnum()) or "Gate",
        "shortDescription": {"text": text},
        "fullDescription": {"text": f"{text} See docs/reading-the-report.md."},
        "help": {"text": "docs/reading-the-report.md says what this means; docs/defences.md says what stops it."},
        "properties": {"tags": ["privacy", "security"]},
    }


def _result(rule: str, place: int, level: str, text: str, case_id: str, address: str, line: object) -> dict[str, Any]:
    start = line if isinstance(line, int) and not isinstance(line, bool) and line >= 1 else 1
    return {
        "ruleId": rule,
        "ruleIndex": place,
        "level": level,
        "message": {"text": text},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": address}, "region": {"startLine": start}}}],
        # GitHub merges results of one rule and line whose hash of the line is equal.
        "partialFingerprints": {"unmaskFinding/v1": case_id, "primaryLocationLineHash": case_id},
    }


def _address(audit: Audit) -> str:
    """The plan as a relative URI; the manifest where no plan made the findings (a live federation)."""
    path = PurePath(str(plan_of(audit.manifest).get("path") or MANIFEST))
    encoded = quote(path.as_posix().encode("utf-8", "replace"))
    return f"file://{encoded}" if path.is_absolute() else encoded
