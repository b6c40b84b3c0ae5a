"""How often the state of a wrong token agrees with the one seen, though nothing ties the two: by chance.

What is compared may be narrow, coarse, or nearly the same for all tokens. The difference of two tokens' states is taken
as Gaussian, with the covariance 2C of what is expected of tokens, and Chernoff bounds how often it is short:

    P(‖δ‖ ≤ r‖s‖)  ≤  min_{t ≥ 0} exp( t·r² − ½·Σ_i log(1 + 2·t·λ_i) ),    λ_i the eigenvalues of 2C by ‖s‖²

Notation: s the state, as it is compared; r the radius by its norm; C between tokens (templates.py).
Limits: speaks of tokens at random. Tokens that are like each other, more than these, are looked for one by one.
Cost: the eigenvalues of an m × m matrix, once for a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.templates import TokenStates
from unmask.models.adapter import Model
from unmask.models.readouts import Readout
from unmask.proof.state_noise import lengths_of

_SAMPLED = 1024  # tokens that the usual weights and norm of a state are taken from


@dataclass(frozen=True)
class ChanceAgreement:
    """Variances of the difference of two tokens' states along its principal directions, by a state's squared norm."""

    variances: Float[Tensor, " m"]

    @classmethod
    def of(cls, model: Model, table: TokenStates, readout: Readout) -> ChanceAgreement:
        """Of a table of expected states."""
        step = max(1, model.vocab_size // _SAMPLED)
        rows = table.means(torch.arange(0, model.vocab_size, step, device=table.shift.device))
        weights = readout.weights(model, rows)
        usual = weights.median(dim=0).values.double()
        square = float(lengths_of(rows * weights).square().median())
        between = usual[:, None] * table.between.double() * usual
        return cls(2 * torch.linalg.eigvalsh(between).clamp_min(0) / square)

    def __call__(self, radius: float) -> float:
        """Bound how often two states are at most `radius` apart."""
        t = torch.logspace(-6, 6, 49, dtype=torch.float64, device=self.variances.device) / radius**2
        exponents = t * radius**2 - torch.log1p(2 * t[:, None] * self.variances).sum(1) / 2
        return math.exp(min(0.0, float(exponents.min())))
