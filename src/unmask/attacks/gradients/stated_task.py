"""Whether an update contradicts the classification that somebody stated: then the statement is passed over.

A classifier moves no layer that predicts tokens. Language modelling moves every row of it, along the few states that
predicted:

    rows of a token head:   classifier  0, or noise, equal in all directions
                            language model  Σ pᵢ(v)·hᵢ,  along some directions above all others

Rows of noise have a covariance whose largest eigenvalue is (1 + √(d/N))² times their mean (Marchenko–Pastur). Rows of a
tied embedding that are longer than most may be tokens of the batch, and are left out.

Limits: updates without a layer that predicts tokens say nothing, nor do pruned ones. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decay_in_gradients import without_decay
from unmask.attacks.run import Progress, silent
from unmask.evidence.captured import is_classifier
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model
from unmask.recovery import RecoveredTexts, Recovery

_ALL = 0.99  # of the rows: one or two may be padding, which gets no gradient
_USUAL = 1.3  # times the median norm: rows of noise have lengths within a few per cent
_FEWEST, _MOST = 16, 4096  # rows that are looked at
_STANDS_OUT = 2.0  # times the largest eigenvalue that noise has


Attack = Callable[..., Recovery[RecoveredTexts]]


def as_update_shows(attack: Attack) -> Attack:
    """An attack's `__call__` that takes decay out, passes over a task that the update contradicts, and says so."""

    @wraps(attack)
    def call(
        self: Any, evidence: GradientEvidence, model: Model, progress: Progress = silent
    ) -> Recovery[RecoveredTexts]:
        plain, decay = without_decay(evidence, model)
        believed, task = believe(plain, model)
        found = attack(self, believed, model, progress)
        why = "; ".join(sentence for sentence in (decay, task) if sentence)
        return replace(found, reason=f"{why}: {found.reason}") if why else found

    return call


def believe(evidence: GradientEvidence, model: Model) -> tuple[GradientEvidence, str]:
    """The evidence without a task that it contradicts, and what contradicts it; else as it is, and nothing."""
    plain = evidence.optimizer in (None, "sgd") and not evidence.weight_decay
    if evidence.task is not Task.CLASSIFICATION or (evidence.update is not Update.GRADIENT and not plain):
        return evidence, ""
    for name in _token_heads(model):
        if name in evidence.gradients and _is_structured(evidence.gradients[name]):
            why = f"task='classification' was stated, but '{name}' learned to predict tokens: read as a language model"
            return replace(evidence, task=None, pooling=None, head=None), why
    return evidence, ""


def _token_heads(model: Model) -> Iterator[str]:
    """Matrices that take part in predicting tokens, and in no classifier; a client may have borrowed the embedding."""
    yield model.token_embedding
    if model.unembedding_name is None:
        return
    body = {id(parameter) for parameter in model.body.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in body and parameter.ndim == 2 and not is_classifier(name):
            yield name


def _is_structured(gradient: Float[Tensor, "v d"]) -> bool:
    rows = gradient[:: max(1, len(gradient) // _MOST)].double()
    moved = rows[rows.any(dim=1)]
    if len(moved) < max(_FEWEST, _ALL * len(rows)):
        return False
    norms = moved.norm(dim=1)
    kept = moved[norms <= _USUAL * norms.median()]
    eigenvalues = torch.linalg.eigvalsh(kept.T @ kept)
    of_noise = (1 + (kept.shape[1] / len(kept)) ** 0.5) ** 2
    return float(eigenvalues[-1] / eigenvalues.mean()) > _STANDS_OUT * of_noise
