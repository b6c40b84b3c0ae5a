"""The report as JUnit XML: one test case for each finding and gate."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from unmask.audit.cases.case_names import case_name, full_name, model_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import Judgement, Verdict
from unmask.report.numbers import leak_in_words, number
from unmask.report.page import judgements_by_finding, missing_cases
from unmask.report.secrets import reason
from unmask.safe_text import make_safe


def render_junit(audit: Audit, verdict: Verdict, folder: Path) -> str:
    """Failure: a gate is crossed. Error: a case raised, or its gate is inconclusive. Skipped: the same, ungated."""
    suite = ElementTree.Element("testsuite", name="unmask audit")
    judgements = judgements_by_finding(verdict)
    for finding in audit.findings:
        for place, judgement in enumerate(judgements.get(finding.id, (None,))):
            seconds = number(finding.run, "seconds") if place == 0 else None
            _add(suite, finding, judgement, seconds or 0.0)
    gated = {make_safe(case["id"]) for case in audit.planned if case["gates"]}
    for case_id, name in missing_cases(audit):
        case = ElementTree.SubElement(
            suite, "testcase", classname="unmask.missing", name=f"{name} [{case_id}]", time="0"
        )
        _add_unknown(case, "not run yet; run the same audit again to continue", case_id in gated)
    for kind, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(kind, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suite.set("time", f"{sum(float(case.get('time', 0)) for case in suite):.3f}")
    suites = ElementTree.Element("testsuites", name=make_safe(verdict.headline, 1000))
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ElementTree.Element, finding: Finding, judgement: Judgement | None, seconds: float) -> None:
    channel = make_safe(finding.case.get("channel", "?"), 40)
    gate = "no gate" if judgement is None else f"gate {make_safe(judgement.gate.text)!r}"
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"unmask.{channel}.{model_name(finding.case)}",
        name=f"{case_name(finding.case)} [{make_safe(finding.id)}] {gate}",
        time=f"{seconds:.3f}",
    )
    why = reason(finding)
    measured = f"{finding.outcome.value}: {leak_in_words(finding)} ({finding.status})"
    if finding.outcome is Outcome.ERROR:
        ElementTree.SubElement(case, "error", message=why, type="error")
    elif judgement is not None and judgement.ruling is Ruling.CROSSED:
        node = ElementTree.SubElement(case, "failure", message=f"{gate} is crossed; {measured}", type="crossed")
        node.text = f"{full_name(finding.case)}\n{why}"
    elif judgement is not None and judgement.ruling is Ruling.INCONCLUSIVE:
        open_point = f"{gate} is inconclusive ({finding.status}): {make_safe(judgement.why)}"
        _add_unknown(case, f"{open_point}; {why}", is_gated=True)
    elif judgement is None and finding.outcome is Outcome.INCONCLUSIVE:
        _add_unknown(case, f"inconclusive, so nothing is known ({finding.status}): {why}", is_gated=False)
    else:
        held = "" if judgement is None else f"{gate} is held: {make_safe(judgement.why)}\n"
        ElementTree.SubElement(case, "system-out").text = f"{measured}\n{held}{why}"


def _add_unknown(case: ElementTree.Element, message: str, is_gated: bool) -> None:
    """Under a gate it may not look passed, as the exit code does not; many readers count 'skipped' as passed."""
    if is_gated:
        ElementTree.SubElement(case, "error", message=message, type="inconclusive")
    else:
        ElementTree.SubElement(case, "skipped", message=message)
