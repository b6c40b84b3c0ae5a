"""Plans of one group on a small model, and the findings of their cases."""

from __future__ import annotations

from pathlib import Path

from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.plan import Plan

NO_LEAK = (Outcome.NO_LEAK, Outcome.INCONCLUSIVE)


def tell(plan: Plan) -> list[Finding]:
    context = WorkerContext(plan.data)
    return [CHANNEL_AUDITS[case["channel"]].run(case, context) for case in plan.cases]


def group(channel: str, folder: Path, rest: str = "") -> str:
    return f'[[{channel}]]\nmodels = ["{folder}"]\ndata = ["notes"]\nbatch_sizes = [2]\n{rest}\n'
