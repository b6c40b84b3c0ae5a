"""The attack as arXiv 2310.12462 has it: Newton's method on the regularised loss of one attention layer.

    X̂ = argmin ‖softmax(scale·X W Xᵀ)·X·V − B‖² + γ‖X‖²,   from a start near it

It is here to be compared with. What the minimum of this loss proves about the input is nothing: pre-images are not
unique, the loss is not convex, and with a γ large enough to make it so (n·d·R⁸) the minimum is X̂ ≈ 0. So the attack
never says RECOVERED.

Limits: needs a start inside Newton's basin: within a thousandth of ‖X‖, or less where W is indefinite.
Cost a step: n³d² + (nd)³.
Source: arXiv 2310.12462, Theorem 1.3; docs/outputs-paper.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.attention_loss import AttentionLoss
from unmask.linalg.softmax_attention import AttentionMap
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of
from unmask.solvers.iterate import Ending, IterationResult, iterate
from unmask.solvers.newton import Dense, Newton, NewtonMatrix, NewtonState

_ROUNDINGS = 4.0  # of the sizes that enter the residual; 500 random layers left 0.3
_FLAT = 1e-6  # ∇L against 2‖V‖‖c‖: above it, too few digits are left to tell a stationary point from a pre-image


@dataclass(frozen=True)
class PaperSolution:
    """Where Newton's method ended, and L on the way there."""

    X: Float[Tensor, "n d"]
    values: tuple[float, ...]


@dataclass(frozen=True)
class PaperNewton:
    """Settings. `start` None: the rows of B V⁺, which are convex combinations of the input's rows."""

    gamma: float = 0.0
    start: Float[Tensor, "n d"] | None = field(default=None, compare=False, repr=False)
    matrix: NewtonMatrix = field(default_factory=Dense)
    line_search: bool = False
    tolerance: float = 1e-13
    max_steps: int = 50

    def __call__(self, evidence: AttentionEvidence, progress: Progress = silent) -> Recovery[PaperSolution]:
        """Minimise, then say what the minimum is worth."""
        run = Run(progress=progress)
        loss = self.loss(evidence)
        outcome = iterate(
            Newton(self.tolerance, self.matrix, self.line_search),
            loss,
            self._first(loss),
            max_steps=self.max_steps,
            watch=lambda done, _: progress("Newton steps", done, self.max_steps),
        )
        certificate = _certificate(evidence, outcome.state)
        status, reason = _claim(outcome, certificate, self.gamma)
        return Recovery(
            value=PaperSolution(outcome.state.x, outcome.values),
            status=status,
            reason=reason,
            certificate=certificate,
            cost=run.cost(candidates=outcome.num_steps),
            used=("W", "V", "output"),
            searches=searches_of(Aim.INPUTS, unconfirmed=True),  # pre-images may not be unique: it finds one of them
        )

    def loss(self, evidence: AttentionEvidence) -> AttentionLoss:
        """The paper's loss of this evidence, in float64."""
        attention = AttentionMap(evidence.scale * evidence.W.double(), evidence.causal)
        return AttentionLoss(attention, evidence.V.double(), evidence.output.double(), self.gamma)

    def _first(self, loss: AttentionLoss) -> Float[Tensor, "n d"]:
        shape = len(loss.B), len(loss.V)
        if self.start is None:
            return loss.B @ torch.linalg.pinv(loss.V)
        if self.start.shape != shape:
            raise InputError(f"the start must have the input's shape {shape}, got {tuple(self.start.shape)}")
        return self.start.to(loss.B)


def _certificate(evidence: AttentionEvidence, state: NewtonState) -> Certificate:
    """Whether X̂ explains the output to the last digits that the evidence has."""
    unexplained = float(state.point.c.norm())
    output = float(state.point.loss.B.norm()) or 1.0
    eps = torch.finfo(evidence.output.dtype).eps
    return Certificate(
        claim="the layer maps X̂ to the output that was seen; other inputs may be mapped there too",
        residual=unexplained / output,
        tolerance=min(_ROUNDINGS * eps * state.point.rounded_size / output, eps**0.5),  # half the digits at the least
        details={"loss": state.value, "gradient": float(state.point.gradient.norm()), "norm": float(state.x.norm())},
    )


def _claim(outcome: IterationResult[NewtonState], certificate: Certificate, gamma: float) -> tuple[Status, str]:
    left = f"leaves {certificate.residual:.1e} of the output unexplained"
    if certificate.holds:
        return Status.PARTIAL, "X̂ explains the output to rounding, but pre-images may not be unique: it is one of them"
    if outcome.ending is not Ending.CONVERGED:
        return Status.NOTHING_FOUND, f"after {outcome.num_steps} steps X̂ {left}. {outcome.ending.value}"
    if gamma > 0:
        bias = f"γ = {gamma:.1e} moves it towards X = 0 (norm {certificate.details['norm']:.1e})"
        return Status.NOTHING_FOUND, f"the stationary point of the regularised loss {left}: {bias}"
    point = outcome.state.point
    if point.gradient.norm() > _FLAT * 2 * point.loss.V.norm() * point.c.norm():
        return Status.NOTHING_FOUND, f"X̂ {left}: near rounding, but not at it; whether a pre-image is near is not known"
    return Status.NOTHING_FOUND, f"the stationary point {left}: a local minimum or a saddle, not a pre-image"
