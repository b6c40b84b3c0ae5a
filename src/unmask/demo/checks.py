"""What must hold of the demo, whatever the machine: undefended secrets leak in full, controls give nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unmask.audit.cases.case_names import model_and_case
from unmask.audit.findings.finding import Finding, Outcome


def find_broken_claims(findings: Sequence[Finding], controls: Collection[str]) -> list[str]:
    """One sentence for each finding that is not as it must be; `controls` are ids of cases without a signal."""
    broken = []
    for finding in findings:
        name = model_and_case(finding.case)
        if finding.outcome is Outcome.ERROR:
            broken.append(f"{name} ended in an error: {finding.reason}")
        elif finding.id in controls:
            if finding.outcome is Outcome.LEAK:
                broken.append(f"the control {name} leaks, though its evidence holds no signal")
        elif _is_bare(finding) and not _leaks_in_full(finding):
            broken.append(f"{name} should leak in full, but: {finding.reason}")
    return broken


def _is_bare(finding: Finding) -> bool:
    """Whether nothing stands between the secret and the adversary; a mean of states hides what it is a mean of."""
    return not finding.case["defences"] and finding.case.get("site") != "mean"


def _leaks_in_full(finding: Finding) -> bool:
    return finding.metrics.get("exact_rate") == 1.0 or finding.metrics.get("weights_found", 0) > 0
