"""The verdict on an audit. What is printed and the exit code come from here, and from nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unmask.audit.cases.case import case_id
from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.gates import Gate, Ruling, parse_gate
from unmask.displays import Displayed, Row
from unmask.wording import count_noun

PASSED, CROSSED, FAILED, INCONCLUSIVE = 0, 1, 2, 3  # as exit codes
_WORTH = "Only these attacks were tested."


@dataclass(frozen=True)
class Judgement:
    """What one gate says of one finding, and why."""

    gate: Gate
    finding: Finding
    ruling: Ruling
    why: str


@dataclass(frozen=True, repr=False)
class Verdict(Displayed):
    """The whole audit in one sentence, with what it rests on."""

    exit_code: int
    headline: str
    judgements: tuple[Judgement, ...]
    outcomes: Mapping[Outcome, int]
    missing: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """The headline; gates that are crossed or open with their cases; what leaks, and what is missing."""
        named = [
            (judgement.ruling.value, f"'{judgement.gate}' · {full_name(judgement.finding.case)}")
            for judgement in (*self.crossed, *self.inconclusive)
        ]
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in self.outcomes.items() if count)
        missing = [("not run", count_noun(len(self.missing), "case"))] if self.missing else []
        return (f"Verdict, exit code {self.exit_code}", self.headline), [*named, ("cases", counts or "none"), *missing]

    @property
    def crossed(self) -> tuple[Judgement, ...]:
        """Judgements of gates that were crossed."""
        return tuple(judgement for judgement in self.judgements if judgement.ruling is Ruling.CROSSED)

    @property
    def inconclusive(self) -> tuple[Judgement, ...]:
        """Judgements of gates that are neither crossed nor held."""
        return tuple(judgement for judgement in self.judgements if judgement.ruling is Ruling.INCONCLUSIVE)


def reach_verdict(audit: Audit) -> Verdict:
    """Crossed gates come first, then errors, then what is not known; only the rest may pass."""
    gates = {case["id"]: [parse_gate(text) for text in case["gates"]] for case in audit.planned}
    judgements = tuple(
        Judgement(gate, finding, *gate.explain(finding))
        for finding in audit.findings
        for gate in gates.get(finding.id, ())
        if gate.concerns(str(finding.case["channel"]))
    )
    judgements = tuple(judgement for judgement in judgements if not _is_spoken_for(judgement, audit.findings))
    outcomes = {outcome: sum(f.outcome is outcome for f in audit.findings) for outcome in Outcome}
    missing = tuple(audit.missing)
    code, headline = _sentence(audit.findings, judgements, outcomes, len(missing))
    return Verdict(code, headline, judgements, outcomes, missing, audit.findings)


def _is_spoken_for(judgement: Judgement, findings: Sequence[Finding]) -> bool:
    """Whether a chosen attack crossed nothing and the default attack ran on the same case: that one decides."""
    finding = judgement.finding
    if finding.is_default_attack or judgement.ruling is Ruling.CROSSED:
        return False
    return case_id({**finding.case, "attack": "default"}) in {other.id for other in findings}


def _sentence(
    findings: Sequence[Finding], judgements: Sequence[Judgement], outcomes: Mapping[Outcome, int], num_missing: int
) -> tuple[int, str]:
    crossed = [judgement for judgement in judgements if judgement.ruling is Ruling.CROSSED]
    unknown = {judgement.finding.id for judgement in judgements if judgement.ruling is Ruling.INCONCLUSIVE}
    leaks = f"{outcomes[Outcome.LEAK]} of {count_noun(len(findings), 'case')} leaked"
    if outcomes[Outcome.INCONCLUSIVE]:
        leaks += f", {outcomes[Outcome.INCONCLUSIVE]} inconclusive"
    if crossed:
        gates = sorted({judgement.gate.text for judgement in crossed})
        cases = len({judgement.finding.id for judgement in crossed})
        return CROSSED, f"A gate is crossed: {_join_names(gates)} by {count_noun(cases, 'case')}; {leaks}."
    if outcomes[Outcome.ERROR]:
        return (
            FAILED,
            f"{count_noun(outcomes[Outcome.ERROR], 'case')} ended in an error, so the audit is incomplete; {leaks}.",
        )
    if num_missing:
        return INCONCLUSIVE, f"The audit is not finished: {count_noun(num_missing, 'case')} not run yet; {leaks}."
    if unknown:
        return (
            INCONCLUSIVE,
            f"Inconclusive: for {count_noun(len(unknown), 'case')} it is not known whether the gate holds; {leaks}.",
        )
    if judgements:
        judged = len({judgement.finding.id for judgement in judgements})
        free = f", {len(findings) - judged} without a gate" if judged < len(findings) else ""
        return PASSED, f"No gate is crossed in {count_noun(judged, 'case')}{free}; {leaks}. {_WORTH}"
    if all(finding.outcome is Outcome.INCONCLUSIVE for finding in findings):
        return INCONCLUSIVE, "Inconclusive: no attack could tell."
    return PASSED, f"Done, and no gate was set; {leaks}."


def _join_names(texts: Sequence[str]) -> str:
    return ", ".join(f"'{text}'" for text in texts)
