"""Tokens from a bill: those that were counted."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.counts import CountEvidence
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, RecoveredTexts, Recovery, Status, searches_of


@dataclass(frozen=True)
class CountAttack:
    """Names every token with a count of at least one half, if all counts are whole."""

    def __call__(self, evidence: CountEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """Run the attack."""
        run, counts = Run(progress=progress), evidence.counts
        certificate = Certificate("every count is a whole number", float((counts - counts.round()).abs().max()), 0.0)
        status = Status.PARTIAL if certificate.holds else Status.NOTHING_FOUND
        tokens = (counts > 0.5).nonzero().flatten().tolist() if certificate.holds else []
        value = RecoveredTexts(token_set=frozenset(tokens))
        searches = searches_of(Aim.TOKENS)
        return Recovery(value, status, "Counts were read.", certificate, run.cost(), ("counts",), searches)
