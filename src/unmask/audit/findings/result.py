"""From a recovery, or from an exception, to a finding; the same for audits of a plan and of a live federation."""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unmask import __version__
from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Finding
from unmask.channels import CHANNELS
from unmask.errors import TooSmallError, UnmaskError
from unmask.metrics import names_what_is_not_there
from unmask.models.adapter import Model
from unmask.recovery import Recovery, Status

TIME_LIMIT = "time_limit"  # in the run of a finding: the seconds that ended it


def finding_of(case: Case, model: Model | None, recovery: Recovery[Any], scores: Mapping[str, Any]) -> Finding:
    """A recovery as a finding; `scores` are the fields that compare it with the secret, or show what was found."""
    cost = asdict(recovery.cost)
    del cost["seconds"]  # differs when the case runs again
    return Finding(
        id=case.id,
        case=case.spec,
        status=recovery.status.name,
        reason=recovery.reason,
        certificate={**asdict(recovery.certificate), "holds": recovery.certificate.holds},
        cost=cost,
        used=recovery.used,
        model_fingerprint=None if model is None else model.fingerprint(),
        looked_for=_aims(case, recovery, scores.get("metrics") or {}),
        **scores,
    )


def _aims(case: Case, recovery: Recovery[Any], metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """What the attack looked for, of what the channel has.

    Nothing, if it is certain of all and is wrong: behind noise another input gives a layer's output exactly, and that
    is where it looked.
    """
    possible = CHANNELS[case["channel"]].aims
    if recovery.status is Status.RECOVERED and names_what_is_not_there(metrics):
        return ()
    return tuple(sorted(aim.value for aim in recovery.looked_for & possible))


def error_finding(case: Case, error: BaseException) -> Finding:
    """A case that raised: what, and where in the code. Where a defence left too little, that is no error.

    Messages of unmask's own errors are for people. Third-party ones may quote any value, a secret text too: they are
    kept in `error`, where texts are kept as well, and never become the reason.
    """
    if isinstance(error, TooSmallError):
        return Finding(case.id, case.spec, Status.NOT_APPLICABLE.name, str(error))
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
    message = str(error) or kind
    if isinstance(error, UnmaskError):
        reason = f"{kind}: {message}"
    else:
        reason = f"{kind} at {where[-1] if where else 'an unknown place'}; findings.jsonl has its message"
    document = {"type": kind, "message": message, "traceback": "\n".join(where)}
    return Finding(case.id, case.spec, ERROR, reason, error=document)


def late_finding(case: Case) -> Finding:
    """A case whose time limit ended it: nothing is known."""
    reason = (
        f"the time limit of {case.time_limit:g} s ended the attack, so nothing is known; raise time_limit in the plan "
        "and run the same command again"
    )
    return Finding(case.id, case.spec, Status.BUDGET_EXHAUSTED.name, reason, run={TIME_LIMIT: case.time_limit})


def may_go_on(finding: Finding, case: Case) -> bool:
    """Whether a time limit ended the finding, and the plan now allows more."""
    ended = finding.run.get(TIME_LIMIT)
    return isinstance(ended, (int, float)) and (case.time_limit is None or case.time_limit > ended)


class Clock:
    """Started with a case; stamps its finding with what may differ when the case runs again: time, place, version."""

    def __init__(self) -> None:
        self._started, self._clock = datetime.now(UTC), time.perf_counter()

    def stamp(self, finding: Finding, device: str) -> Finding:
        """The finding, with its run."""
        run = {
            "seconds": round(time.perf_counter() - self._clock, 3),
            "started": self._started.isoformat(timespec="seconds"),
            "host": platform.node(),
            "device": device,
            "unmask": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        return replace(finding, run={**run, **finding.run})
