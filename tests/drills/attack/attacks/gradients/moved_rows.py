"""Tokens whose row of the embedding has a gradient: an attack of one line, to show how little an attack takes."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.attacks.claims import claim_nothing
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.recovery import Aim, Certificate, RecoveredTexts, Recovery, Status, searches_of


@dataclass(frozen=True)
class MovedRows:
    """Names every token whose row moved by more than `least`."""

    least: float = 0.0

    def __call__(
        self, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        """Run the attack."""
        run, name, searches = Run(progress=progress), model.token_embedding, searches_of(Aim.TOKENS)
        if name not in evidence.gradients:
            return claim_nothing(run, Status.MISSING_EVIDENCE, f"The update lacks '{name}'.")
        sizes = evidence.gradients[name].double().norm(dim=1)
        tokens = frozenset((sizes > self.least).nonzero().flatten().tolist())
        certificate = Certificate("the rows of all other tokens are zero", float(sizes[sizes <= self.least].max()), 0.0)
        value = RecoveredTexts(token_set=tokens)
        return Recovery(
            value, Status.PARTIAL, "Rows of the embedding moved.", certificate, run.cost(), (name,), searches
        )
