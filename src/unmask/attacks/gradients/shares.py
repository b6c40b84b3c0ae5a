"""Where each token stands: what arrives at tokens and what arrives at positions, compared.

A first input is x(t, p) = (g∘w̄_t + g∘p̄_p)/σ + β, so the gradients of block 0's queries, keys and values are

    G = Σ x(t, p)ᵀ·∂(t, p) = Σ_t (g∘w̄_t)ᵀ·D_t + Σ_p (g∘p̄_p)ᵀ·D_p + βᵀ·D_β

with D_t = Σ_p ∂(t, p)/σ summed over a token's places, and D_p over a position's tokens. The vectors on the left are
known and independent, so least squares gives every D_t and D_p exactly. A token that occurs once has D_t = ∂(t, p)/σ, a
summand of one D_p: the *share* of p in token t is 1. A token of several places spreads.

Limits: tokens + positions < d. Shares of tokens that occur several times are a hint, no proof.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.box_least_squares import project_to_simplex
from unmask.models.bert import Bert
from unmask.models.linear import Role

_NUM_ITERATIONS = 300


@torch.no_grad()
def position_shares(
    evidence: GradientEvidence, model: Bert, tokens: Int[Tensor, " t"], num_positions: int
) -> Float[Tensor, "p t"]:
    """S ≥ 0 with columns that sum to 1 and D_p ≈ Σ_t S(p, t)·D_t.

    Gradients of the two embeddings are sums over the same places, and are used as further columns if they are shared.
    Cost: one least-squares problem of size d, then p·t² an iteration.
    """
    at_tokens, at_positions = _arriving(evidence, model, tokens, num_positions)
    rows = [model.token_embedding, model.position_embedding]
    if all(name in evidence.gradients for name in rows) and model.unembedding is None:
        moved, filled = (evidence.gradients[name].double() for name in rows)
        scale = at_tokens.norm() / moved[tokens].norm().clamp_min(1e-300)
        at_tokens = torch.cat([at_tokens, scale * moved[tokens]], dim=1)
        at_positions = torch.cat([at_positions, scale * filled[:num_positions]], dim=1)
    return _convex_combinations(at_positions, at_tokens)


def _arriving(
    evidence: GradientEvidence, model: Bert, tokens: Int[Tensor, " t"], num_positions: int
) -> tuple[Float[Tensor, "t m"], Float[Tensor, "p m"]]:
    """D_t and D_p, each of the three gradients scaled to norm 1."""
    words, places, shift = model.first_input_sum.parts(tokens, num_positions)
    kinds = model.token_type_differences
    gradients = (evidence.linear(model, role, 0) for role in (Role.QUERY, Role.KEY, Role.VALUE))
    stacked = torch.cat([g.double() / g.double().norm() for g in gradients if g is not None], dim=1)
    known = torch.cat([words, places, shift[None], kinds])
    arriving = torch.linalg.lstsq(known.T, stacked).solution
    return arriving[: len(tokens)], arriving[len(tokens) : len(tokens) + num_positions]


def _convex_combinations(sums: Float[Tensor, "p m"], parts: Float[Tensor, "t m"]) -> Float[Tensor, "p t"]:
    """argmin ‖sums − S·parts‖² over S with columns on the simplex, by accelerated projected gradients (FISTA)."""
    gram, cross = parts @ parts.T, sums @ parts.T
    step = 1 / float(torch.linalg.eigvalsh(gram)[-1].clamp_min(1e-300))
    shares = ahead = torch.full_like(cross, 1 / len(sums))
    momentum = 1.0
    for _ in range(_NUM_ITERATIONS):
        moved = project_to_simplex(ahead - step * (ahead @ gram - cross))
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - shares)
        shares, momentum = moved, following
    return shares
