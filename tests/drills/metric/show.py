"""The metric 'longest_text' is measured, a gate on it is judged, and the report names it."""

from __future__ import annotations

from tests.drills.shown import audit, dry_run, group, report

from unmask.audit.findings.gates import parse_gate

assert parse_gate("longest_text < 3").metric == "longest_text"
gated = group("gradients", 'gates = ["longest_text < 3"]')
assert len(dry_run(gated)) == 1

(finding,) = audit(gated)
assert finding.metrics["longest_text"] > 3
assert parse_gate("longest_text < 3").judge(finding).value == "crossed"
assert report("html").count("longest_text") >= 2  # the gate, and the number of the finding
assert "longest_text < 3" in report("markdown")
assert "longest_text" in report("junit")
