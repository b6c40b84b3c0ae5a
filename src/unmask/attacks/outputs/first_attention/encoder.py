"""Tokens from the output of an encoder's first attention module: one span for all positions at once.

    A = (B − b)·W_O⁻¹,   head h:  Aₕ = Fₕ·Vₕ,   Vₕ the values of all n tokens, Fₕ (n, n) its attention

Every row mixes all tokens, so there is no first one to begin with; but where Fₕ is invertible the rows of Aₕ span
exactly the n values of head h. With n < e a value v(t, p) lies in that span for t = t_p, and for a wrong token only on
a set of measure zero. Positions are part of the values (learned positions), so each position picks its own token: the
one that leaves least outside the spans of all heads,

    Σₕ wₕ²·‖Nₕ·vₕ(t, p)‖²,   wₕ = σ_min(Aₕ)

Noise δ in A tilts a head's span by δ/σ_min(Aₕ) (Wedin), so these weights make what noise leaves of the right token
equal in all heads, and heads whose Fₕ is singular have no say. The tokens are sent through the module once: the
relative errors of the recomputed rows are the certificate, and the same with one token replaced by its runner-up tells
how clear each is.

Notation: as in attack.py; N the projection onto the complement of a head's span.
Limits: n < e, or no head leaves anything outside its span. Token types are taken to be 0 (one text, not a pair). One
wrong token spoils every row: the certificate then holds for none.
Cost: vocab·d·h·e multiplications once, vocab·h·e a position, n + 1 texts through the module.
Source: as attack.py; Wedin, BIT 12 (1972), for the tilt of a span under noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.first_attention.module import AttentionReading, Choice, rounding_error
from unmask.attacks.outputs.prompts.equal_tokens import Classes, equal_tokens
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.models.output_projection import OutputProjection
from unmask.shapes import Rows


@torch.no_grad()
def read_encoder(model: Model, outputs: Rows, positions: Sequence[int], min_gap_decades: float) -> AttentionReading:
    """Tokens of one text from the module's output rows; `model` in float64, rows in the precision they came in."""
    length, projection, rows = len(outputs), OutputProjection.of(model, 0), outputs.double()
    if projection.condition == float("inf") or length >= model.head_width:
        return AttentionReading((), 0, length)
    complements = weighted_complements(_by_head(model, projection.invert(rows)))
    equal = equal_tokens(model, "inputs")
    best, other = nearest_tokens(model, complements, positions, equal)
    errors, refused = _errors(model, projection, rows, best, other, positions)
    if errors.max() > rounding_error(outputs.dtype):  # every row depends on every token: nothing is known of any
        return AttentionReading((), 0, length)
    choices = tuple(
        Choice(token, error, miss, model.vocab_size, equal.get(token, ()))
        for token, error, miss in zip(best.tolist(), errors.tolist(), refused.tolist(), strict=True)
    )
    clear = [choice.is_clear(min_gap_decades, outputs.dtype) for choice in choices]
    return AttentionReading(choices, clear.index(False) if False in clear else length, length)


def weighted_complements(heads: Float[Tensor, "h n e"]) -> Float[Tensor, "h e c"]:
    """For each head, a basis of what its rows do not span (c = e − n), times the least singular value of its rows."""
    _, sizes, directions = torch.linalg.svd(heads, full_matrices=True)
    return directions[:, heads.shape[1] :].mT * sizes[:, -1, None, None]


def nearest_tokens(
    model: Model, complements: Float[Tensor, "h e c"], positions: Sequence[int], equal: Classes = MappingProxyType({})
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """For each position the token whose values leave least outside the heads' spans, and the best that is not equal."""
    weight = model.weight(Role.VALUE, 0)
    assert weight is not None  # every family has values
    nothing = torch.zeros(1, model.width, dtype=model.dtype, device=model.device)
    constant = model.queries_keys_values(0, nothing, torch.zeros(1, dtype=torch.long, device=model.device))[2][0]
    outside = torch.einsum("dhe,hec->dhc", weight.unflatten(1, constant.shape), complements).flatten(1)
    shift = torch.einsum("he,hec->hc", constant, complements).flatten()
    found = []
    for rest in model.project_first_inputs(outside, positions):
        sizes = (rest + shift).norm(dim=1)
        best = int(sizes.argmin())
        sizes[list(equal.get(best, (best,)))] = torch.inf
        found.append((best, int(sizes.argmin())))
    bests, others = torch.tensor(found, device=outside.device).T
    return bests, others


def _errors(
    model: Model,
    projection: OutputProjection,
    rows: Rows,
    best: Int[Tensor, " n"],
    other: Int[Tensor, " n"],
    positions: Sequence[int],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Relative errors of the recomputed rows, and of each row when its token is replaced by the runner-up."""
    texts = best.expand(len(best) + 1, -1).clone()
    texts[1:].diagonal().copy_(other)
    places = torch.tensor(list(positions), device=best.device).expand_as(texts)
    mixed = model.mixed_values(0, model.embed(texts, places), places, torch.ones_like(texts, dtype=torch.bool))
    errors = (projection(mixed) - rows).norm(dim=2) / rows.norm(dim=1).clamp_min(1e-300)
    return errors[0], errors[1:].diagonal()


def _by_head(model: Model, mixed: Float[Tensor, "n o"]) -> Float[Tensor, "h n e"]:
    return mixed.unflatten(1, (model.num_heads, model.value_width)).transpose(0, 1)
