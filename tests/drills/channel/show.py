"""A plan with [[counts]] loads; cases run to findings with controls, gates judge them, the report tells them."""

from __future__ import annotations

from tests.drills.shown import audit, dry_run, group, named, report

plan = group("counts", 'defences = ["none", "noise:sigma=1"]\ngates = ["no token"]')
assert "counts" in named("attacks")
assert len(dry_run(plan)) == 2

plain, noisy = audit(plan)
assert plain.case["channel"] == "counts"
assert plain.outcome.name == "LEAK"
assert plain.metrics["token_recall"] == 1
assert noisy.outcome.name == "NO_LEAK"
assert noisy.control["metrics"]["token_recall"] == 1
assert "A bill gives words away" in report("html")  # the threat model
assert "counts" in report("markdown")
