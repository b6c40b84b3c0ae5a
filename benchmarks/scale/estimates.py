"""What `--dry-run` estimates beside what an audit took: run the audit first, on one core that nobody else uses.

python benchmarks/run.py scale estimates plan.toml runs/audit
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from unmask.audit.findings.folder import read_findings
from unmask.audit.plan import load_plan
from unmask.audit.running.estimate import estimate_all


def main() -> None:
    """A line for each case, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path, help="what `unmask audit plan --out FOLDER` wrote")
    options = parser.parse_args()
    cases, (findings, _) = load_plan(options.plan).cases, read_findings(options.folder)
    ratios = []
    for case, guess in zip(cases, estimate_all(cases), strict=True):
        if guess is None or case.id not in findings:
            continue
        took = findings[case.id].run["seconds"]
        ratios.append(took / (60 * guess.minutes))
        print(f"{ratios[-1]:8.2f} times the estimate: {took:.0f} s  {guess}  {case}")
    print(f"median {median(ratios):.2f} of {len(ratios)} cases" if ratios else "no case of the plan has a finding")


if __name__ == "__main__":
    main()
