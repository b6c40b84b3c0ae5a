"""Rows of a text in the spans of later blocks: a text of which texts beside it are missing can still be checked there.

A row that enters a later block is a function of the whole text before it (decoders) or of all of it (encoders). If it
lies in the span of that block's gradients too, the text is in the batch; a wrong one is far from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.subspace import Span, column_span
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.arrivals import TextInput, down_inputs

IN_SPAN = 3e-3  # rows of the batch are within 1e-4, others beyond 1e-1


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
def lies_in(model: Model, text: TextInput, spans: Mapping[int, Span]) -> bool:
    """Whether every row of a text lies in the spans; False where there are none."""
    if not spans or not text.tokens:
        return False
    tokens = torch.tensor([text.tokens], device=model.device)
    positions = (text.start + torch.arange(len(text.tokens), device=model.device))[None]
    types = None if text.types is None else torch.tensor([text.types], device=model.device)
    states = model.hidden_states(
        tokens, num_blocks=max(spans), positions=positions.clamp_max(model.max_positions - 1), types=types
    )
    rows = {block: model.attention_input(block, states[block])[0] for block in spans}
    return all(float(span.distance(rows[block]).max()) <= IN_SPAN for block, span in spans.items())


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
