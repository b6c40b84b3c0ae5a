"""The first questions to a layer: what one token gives, how long tokens should be, and what can be read at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import is_zero
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.resolution import Resolution
from unmask.recovery import Status

_LONGEST = 1e12  # norm of a token where errors are added to answers and no bound was found
_COARSER = 1e-8  # relative: heads are off to 10⁻¹³ then, since scores saturate beyond it
_LONG_TOKEN = 1e6  # at which one-token queries are asked where errors are added to answers


@dataclass(frozen=True, eq=False)
class Layer:
    """How a layer is asked in pairs of tokens, and how finely its answers can be read."""

    pairs: Pairs
    resolution: Resolution

    @property
    def resolutions(self) -> list[Resolution]:
        """What to try: where tokens may not be long, heads that are off to fewer digits need shorter ones."""
        coarser = Resolution(max(_COARSER, self.resolution.precision))
        return [self.resolution] if math.isinf(self.pairs.max_norm) else [self.resolution, coarser]

    def project(self, direction: Float[Tensor, " p"]) -> Layer:
        """The same layer with the answers' component in one direction for its answer."""
        return Layer(replace(self.pairs, direction=direction.to(self.pairs.sum_v.device)), self.resolution)


def open_layer(run: QueryRun) -> Layer | None:
    """Σ_h v_h from one-token queries, and the boost against added errors; None where all answers are 0.

    Cost: width + 4 queries.
    """
    evidence, profile = run.evidence, run.profile
    long = min(_LONG_TOKEN, profile.max_norm) if profile.absolute_error else 1.0
    sum_v = evidence.ask(long * torch.eye(evidence.width, dtype=torch.float64, device=evidence.device)[:, None]) / long
    far = torch.randn(4, 2, evidence.width, generator=run.generator, dtype=torch.float64).to(evidence.device)
    far = long * far / far.norm(dim=2, keepdim=True)
    answers = evidence.ask(far)
    if is_zero(sum_v * long, profile) and is_zero(answers, profile):
        return None
    size = max(float(sum_v.norm()), float(answers.abs().max()) / long)
    longest = min(profile.max_norm, _LONGEST) if profile.absolute_error else profile.max_norm
    boost = profile.boost(size, token_norm=1.0)
    error = profile.precision + profile.absolute_error / (size * min(boost, longest / 2))
    return Layer(Pairs(evidence, sum_v, boost, longest), Resolution(error))


def silence(profile: OracleProfile) -> tuple[Status, str]:
    """How it ends where no answer stands out."""
    if profile.absolute_error:
        reason = f"No answer stands out from what the oracle adds to it, about {profile.absolute_error:.1e}."
        return Status.NOTHING_FOUND, reason
    return (
        Status.NOT_IDENTIFIABLE,
        "The oracle answers 0 to every sequence: v = 0 for every head, and then no answer depends on W.",
    )


def not_applicable(profile: OracleProfile, needed: str) -> str:
    """Why an attack that reads numbers, or vectors, cannot begin."""
    kind = "; ".join(profile.describe())
    if profile.is_linear:
        return f"This attack reads answers that are {needed} ({kind})."
    return f"Answers to one token do not grow with it, as those of an attention layer do ({kind})."
