"""Rows of a text in the spans of later blocks: a text of which texts beside it are missing can still be checked there.

A row that enters a later block is a function of the whole text before it (decoders) or of all of it (encoders). If it
lies in the span of that block's gradients too, the text is in the batch; a wrong one is far from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.subspace import Span, column_span
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.arrivals import TextInput, down_inputs

IN_SPAN = 3e-3  # rows of the batch are within 1e-4, others beyond 1e-1
_EQUAL = 1e-2  # embeddings that differ by less are those of one token
_MOST_PLACES = 8  # of a text that are edited


def spans_of_blocks(evidence: GradientEvidence, model: Model, blocks: Iterable[int]) -> dict[int, Span]:
    """Spans of what enters the attention of blocks, those that leave room to tell."""
    spans = {}
    for block in sorted(set(blocks) & set(range(1, model.num_blocks))):
        gradients = [evidence.linear(model, role, block) for role in (Role.QUERY, Role.KEY, Role.VALUE)]
        present = [gradient for gradient in gradients if gradient is not None]
        span = column_span(*present) if present else None
        if span is not None and span.rank > 0 and not span.is_saturated:
            spans[block] = span
    return spans


@torch.no_grad()
def distance_from(model: Model, text: TextInput, spans: Mapping[int, Span]) -> float:
    """How far the row of a text that is farthest from the spans is; infinite where there are none."""
    if not spans or not 0 < len(text.tokens) <= model.max_positions:
        return float("inf")
    rows = _rows_of(model, torch.tensor([text.tokens], device=model.device), text, spans)
    return max(float(span.distance(rows[block][0]).max()) for block, span in spans.items())


def lies_in(model: Model, text: TextInput, spans: Mapping[int, Span]) -> bool:
    """Whether every row of a text lies in the spans; False where there are none."""
    return distance_from(model, text, spans) <= IN_SPAN


@torch.no_grad()
def distance_of_edits(
    model: Model, text: TextInput, block: int, span: Span, known: Collection[tuple[int, tuple[int, ...]]] = ()
) -> float:
    """How far the nearest row of another token is: at some places the token nearest to that of the text, and one more.

    Tokens whose embeddings are equal to its own are left out: they have the very same row. So are `known` prefixes.
    """
    own = torch.tensor(text.tokens, device=model.device)
    places = torch.linspace(0, len(own) - 1, min(len(own), _MOST_PLACES), device=model.device).round().long().unique()
    rows = model.parameter(model.token_embedding).detach()[: model.vocab_size].float()
    apart = torch.cdist(rows[own[places]], rows) / rows[own[places]].norm(dim=1, keepdim=True).clamp_min(1e-30)
    near = apart.masked_fill(apart <= _EQUAL, torch.inf).argmin(1)
    others = torch.cat([near, (own[places] + model.vocab_size // 2) % model.vocab_size])
    pairs = [
        (place, other)
        for place, other in zip(places.repeat(2).tolist(), others.tolist(), strict=True)
        if (text.start, (*text.tokens[:place], other)) not in known
    ]
    if not pairs:
        return float("inf")
    index, (place, other) = torch.arange(len(pairs), device=model.device), torch.tensor(pairs, device=model.device).T
    edited = own.repeat(len(pairs), 1)
    edited[index, place] = other
    return float(span.distance(_rows_of(model, edited, text, [block])[block][index, place]).min())


def _rows_of(
    model: Model, tokens: Tensor, text: TextInput, blocks: Collection[int]
) -> dict[int, Float[Tensor, "t n d"]]:
    """What enters the attention of blocks, for texts of one length that stand where one does."""
    positions = (text.start + torch.arange(tokens.shape[1], device=model.device)).clamp_max(model.max_positions - 1)
    types = None if text.types is None else torch.tensor([text.types], device=model.device).expand_as(tokens)
    states = model.hidden_states(tokens, num_blocks=max(blocks), positions=positions.expand_as(tokens), types=types)
    return {block: model.attention_input(block, states[block]) for block in blocks}


@torch.no_grad()
def distances_of_ends(evidence: GradientEvidence, model: Model, texts: Sequence[TextInput]) -> list[float] | None:
    """How far the row of each text's last token is from the span of the last block's down projection.

    None where the update does not hold it, or its span is full.
    """
    last = model.num_blocks - 1
    gradient = evidence.linear(model, Role.MLP_OUT, last)
    span = None if gradient is None else column_span(gradient)
    if span is None or span.rank == 0 or span.is_saturated or any(len(t.tokens) > model.max_positions for t in texts):
        return None
    return [float(span.distance(down_inputs(model, text, last)[-1:])[0]) for text in texts]
