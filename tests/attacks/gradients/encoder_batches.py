"""Batches for an encoder, and what an attack sets up from their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unmask.attacks.gradients.bag_of_words.candidates import find_candidates
from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.attacks.gradients.encoder.problem import Problem, set_up
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols import observe_gradients

Texts = Sequence[Sequence[int]]

START, END = 1, 2
FRAME = (START, END)
# Lengths differ; 17 occurs twice in a text and in two texts, 250 at the same position of two texts.
BATCH = [(START, 17, 99, 250, 17, END), (START, 400, 3, 250, 21, 44, END), (START, 5, 17, 60, END)]
# Rows of the batch, in float32, are at 1e-7 to 1e-5 of the gradient's span; rows of no text of it at 0.05 and more.
IN_SPAN, OUT_OF_SPAN = 1e-4, 1e-2


def classified(model: Model, texts: Texts = BATCH, **options: Any) -> GradientEvidence:
    return observe_gradients(model, texts, task="classification", **options)


@torch.no_grad()
def problem_of(model: Model, evidence: GradientEvidence, frame: tuple[int, int] = FRAME) -> Problem:
    """What `EncoderAttack` sets up."""
    problem = set_up(evidence, model, candidates_of(model, evidence), frame)
    assert isinstance(problem, Problem), problem
    return problem


def candidates_of(model: Model, evidence: GradientEvidence) -> Any:
    generator = torch.Generator().manual_seed(0)
    bag = find_candidates(evidence, model, num_probes=32, min_gap_decades=1.0, generator=generator)
    assert bag.candidates is not None, bag.reason
    return bag.candidates


def as_places(places: PositionCandidates, tokens: Sequence[int], kinds: Sequence[int] | None = None) -> Text:
    """The slow, obvious way from tokens to places."""
    rows = zip(places.token.tolist(), places.position.tolist(), places.kind.tolist(), strict=True)
    index = {row: place for place, row in enumerate(rows)}
    kinds = kinds or [0] * len(tokens)
    return tuple(index[token, p, kind] for p, (token, kind) in enumerate(zip(tokens, kinds, strict=True)))


def pair_kinds(tokens: Sequence[int]) -> tuple[int, ...]:
    """Types of a pair: 0 up to the first END, 1 from there on."""
    first = list(tokens).index(END) + 1
    return (0,) * first + (1,) * (len(tokens) - first)


def classified_pairs(model: Model, texts: Texts, pooling: str = "first") -> GradientEvidence:
    """As `observe_gradients`, which knows no pairs: [CLS] one [SEP] other [SEP] with types."""
    length = max(map(len, texts))
    tokens, kinds, mask = (
        torch.stack([functional.pad(torch.tensor(row), (0, length - len(row))) for row in rows])
        for rows in (texts, [pair_kinds(text) for text in texts], [[1] * len(text) for text in texts])
    )
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        states = model.body(input_ids=tokens, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        pooled = states[:, 0] if pooling == "first" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        head = 0.02 * torch.randn(model.width, 2, generator=torch.Generator().manual_seed(0))
        loss = functional.cross_entropy(pooled @ head, torch.arange(len(texts)) % 2)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    shared = {name: g.detach() for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return GradientEvidence(shared, model.fingerprint(), "classification", len(texts))


def with_noise(evidence: GradientEvidence, relative: float, seed: int = 0) -> GradientEvidence:
    """Gaussian noise of a part of each tensor's norm."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=generator)
        return gradient + relative * gradient.norm() / noise.norm() * noise

    return replace(evidence, gradients={name: noisy(gradient) for name, gradient in evidence.gradients.items()})
