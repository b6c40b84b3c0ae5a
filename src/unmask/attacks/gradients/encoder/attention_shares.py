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
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.progress import track

_NUM_ROUNDS = 3
_NUM_ITERATIONS = 150  # a round
_NUM_OTHERS = 256  # rows that are looked at
_LEAST_REST = 1e-2  # of the largest: what is left of a position that nothing disturbs is rounding


@torch.no_grad()
def position_shares(
    evidence: GradientEvidence, model: Model, tokens: Int[Tensor, " t"], num_positions: int, most_noise: float = 0.0
) -> Float[Tensor, "p t"]:
    """S ≥ 0 with columns that sum to 1 and D_p ≈ Σ_t S(p, t)·D_t.

    Gradients of the two embeddings are sums over the same places, and are used as further columns if they are shared.
    They tell nothing if rows of other tokens move too, by more than `most_noise` of the median row of `tokens`.
    Cost: one least-squares problem of size d, then p·t² an iteration.
    """
    at_tokens, at_positions, _ = _arriving(evidence, model, tokens, num_positions)
    moved, filled = (evidence.gradients.get(name or "") for name in (model.token_embedding, model.position_embedding))
    if (
        moved is not None
        and filled is not None
        and _both_tell(moved, filled)
        and not _moves_others(moved, tokens, most_noise)
    ):
        by_row, by_position = moved[tokens].double(), filled[:num_positions].double()
        scale = at_tokens.norm() / by_row.norm().clamp_min(1e-300)
        at_tokens = torch.cat([at_tokens, scale * by_row], dim=1)
        at_positions = torch.cat([at_positions, scale * by_position], dim=1)
    return _convex_combinations(at_positions, at_tokens, model.width)


def _both_tell(moved: Float[Tensor, "v d"], filled: Float[Tensor, "n d"]) -> bool:
    """Whether both have gradients: a client that keeps its embeddings fixed sends zeros."""
    return bool(moved.any()) and bool(filled.any())


def _moves_others(rows: Float[Tensor, "v d"], tokens: Int[Tensor, " t"], most: float) -> bool:
    """Whether rows of tokens outside of the bag have moved too, as a tied output layer or a decay does to all rows."""
    others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    others[tokens] = False
    moved = rows[others.nonzero()[:_NUM_OTHERS, 0]].double().norm(dim=1)
    return bool((moved > most * rows[tokens].double().norm(dim=1).median()).any())


@torch.no_grad()
def type_shares(
    evidence: GradientEvidence, model: Model, tokens: Int[Tensor, " t"], num_positions: int
) -> Float[Tensor, "k t"]:
    """How much of each token's gradient arrives at each token type: as `position_shares`, with types for positions."""
    at_tokens, _, at_types = _arriving(evidence, model, tokens, num_positions)
    first = at_tokens.sum(0, keepdim=True) - at_types.sum(0, keepdim=True)
    return _convex_combinations(torch.cat([first, at_types]), at_tokens, model.width)


def _arriving(
    evidence: GradientEvidence, model: Model, tokens: Int[Tensor, " t"], num_positions: int
) -> tuple[Float[Tensor, "t m"], Float[Tensor, "p m"], Float[Tensor, "k m"]]:
    """D_t, D_p and the same for each token type but 0, each of the three gradients scaled to norm 1."""
    words, places, shift = model.first_input_parts(tokens, num_positions)
    kinds = model.token_type_differences
    gradients = (evidence.linear(model, role, 0) for role in (Role.QUERY, Role.KEY, Role.VALUE))
    stacked = torch.cat([g.double() / g.double().norm() for g in gradients if g is not None], dim=1)
    known = torch.cat([words, places, shift[None], kinds])
    arriving = torch.linalg.lstsq(known.T.cpu(), stacked.cpu()).solution.to(known)  # CUDA's needs full rank
    at_tokens, at_positions, _, at_types = arriving.split([len(tokens), num_positions, 1, len(kinds)])
    return at_tokens, at_positions, at_types


def _convex_combinations(sums: Float[Tensor, "p m"], parts: Float[Tensor, "t m"], width: int) -> Float[Tensor, "p t"]:
    """argmin Σ W(p, l)·‖sums − S·parts‖² over S with columns on the simplex; l runs over layers of `width` columns.

    A token of several places disturbs the positions at which it stands, [MASK] most of all, and each layer differently;
    so W is 1/‖rest‖² of what is left there, round after round. Each round: accelerated projected gradients (FISTA),
    with a step for each token by its own norm.
    """
    layers = list(zip(sums.split(width, dim=1), parts.split(width, dim=1), strict=True))
    grams, crosses = [part @ part.T for _, part in layers], [total @ part.T for total, part in layers]
    shares = torch.full_like(crosses[0], 1 / len(sums))
    weights = torch.ones(len(layers), len(sums), 1).to(sums)
    for _ in track(range(_NUM_ROUNDS), "placing tokens at positions"):
        bound = sum((w.max() * gram for w, gram in zip(weights, grams, strict=True)), torch.zeros_like(grams[0]))
        sizes = bound.diagonal().clamp_min(1e-300)
        steps = 1 / (sizes * torch.linalg.eigvalsh(bound / (sizes[:, None] * sizes).sqrt())[-1])
        wanted = sum((w * cross for w, cross in zip(weights, crosses, strict=True)), torch.zeros_like(shares))
        shares = _descend(shares, torch.cat(grams), wanted, weights, steps)
        rests = torch.stack([(total - shares @ part).square().sum(1, keepdim=True) for total, part in layers])
        weights = 1 / (rests + _LEAST_REST**2 * rests.amax(1, keepdim=True)).clamp_min(1e-300)
        weights = weights / weights.max()
    return shares


def _descend(
    shares: Float[Tensor, "p t"],
    grams: Float[Tensor, "l*t t"],
    wanted: Float[Tensor, "p t"],
    weights: Float[Tensor, "l p 1"],
    steps: Float[Tensor, " t"],
) -> Float[Tensor, "p t"]:
    """The shares after some iterations of FISTA."""
    ahead, momentum = shares, 1.0
    for _ in range(_NUM_ITERATIONS):
        slope = (weights * ahead).transpose(0, 1).flatten(1) @ grams - wanted
        moved = project_to_simplex(ahead - steps * slope)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - shares)
        shares, momentum = moved, following
    return shares
