"""Which tokens a batch may hold, by the length of their rows in an embedding that also predicts tokens.

    row v  =  Σᵢ pᵢ(v)·hᵢ/N  −  Σ over i with label v of hᵢ/N  +  (what reading v adds)

A token that does not occur has the first part alone: its chance instead of 1. Where the model gives no other token much
of a chance, rows of tokens are longer than all others by far, and a gap of the lengths tells them apart.

Notation: hᵢ what the output layer sees at place i of N, pᵢ(v) the probability of v there.
Limits: a guess, not a proof: whoever uses it must confirm the texts. Nothing is returned where there is no gap, as in
models that expect many tokens. Cost: one pass over the rows. Source: measured for this project.
"""

from __future__ import annotations

import torch

from unmask.attacks.gradients.bag_of_words.embedding_rows import positions_from_rows
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates, merge_equal
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model

_MIN_GAP_DECADES = 0.3
_LARGEST_SHARE = 0.25  # of the vocabulary: more tokens than that are no batch


@torch.no_grad()
def find_long_rows(evidence: GradientEvidence, model: Model) -> Candidates | None:
    """Tokens whose rows are longer than all others by a clear gap, at every position that is filled; else None."""
    update = evidence.gradients.get(model.token_embedding)
    if update is None or evidence.update is not Update.GRADIENT or not evidence.may_be_tied(model):
        return None
    lengths = torch.linalg.vector_norm(update, dim=1, dtype=torch.float64)
    longest = lengths.sort(descending=True)
    largest = max(1, int(_LARGEST_SHARE * len(lengths)))
    if not float(longest.values[largest]) > 0:
        return None  # rows that do not move tell more (`embedding_rows.py`)
    logs = longest.values[: largest + 1].log10()
    falls = logs[:-1] - logs[1:]
    last = int(falls.argmax())
    if float(falls[last]) < _MIN_GAP_DECADES:
        return None
    tokens = longest.indices[: last + 1].sort().values.to(model.device)
    positions = positions_from_rows(evidence, model)
    everywhere = range(model.max_positions) if positions is None else positions.tolist()
    places = everywhere if model.learned_positions else [-1]
    gap = Gap(float(1 / longest.values[last]), float(1 / longest.values[last + 1]), floor=0.0)
    return merge_equal(Candidates(dict.fromkeys(places, tokens), gap, len(lengths)), model, told_apart=True)
