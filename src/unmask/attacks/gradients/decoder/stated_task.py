"""Whether an update contradicts the task that somebody stated: statements are believed only where nothing does.

A classifier moves the embedding's rows of the batch's tokens, and no output layer. Next-token training moves every row
of the output layer W, by Σ pᵢ(v)·hᵢ over the n positions, so that all V rows have rank n at most:

    rows in one span ≫ its rank   ⇒   not a classifier

Noise moves rows as well, but not within the span. Limits: as many positions as the width fill it; then nothing is said.
Source: ours.
"""

from __future__ import annotations

from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.subspace import column_span
from unmask.models.adapter import Model

_MANY = 2  # times the rank: rows of different tokens are independent
_INSIDE = 0.1  # of the distance that rows of noise have


def why_no_classifier(evidence: GradientEvidence, model: Model) -> str:
    """What shows that a stated classification is next-token training; empty if nothing does."""
    name = model.unembedding_name
    if evidence.task is not Task.CLASSIFICATION or evidence.update is not Update.GRADIENT or name is None:
        return ""
    if name not in evidence.gradients:
        return ""
    gradient = evidence.gradients[name]
    moved = gradient[gradient.any(dim=1)]
    if len(moved) <= gradient.shape[1]:
        return ""  # so few rows may be independent
    span = column_span(moved.T)
    if span.is_saturated:
        return ""
    by_chance = ((span.width - span.rank) / span.width) ** 0.5
    inside = int((span.distance(moved) < _INSIDE * by_chance).sum())
    if inside <= _MANY * span.rank:
        return ""
    return (
        f"task='classification' was stated, but {inside:,} rows of the output layer '{name}' moved, in only "
        f"{span.rank:,} directions: this is next-token training"
    )
