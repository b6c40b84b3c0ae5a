"""Tokens that could stand in another's place: the replay must tell each text from the same with a token near its own.

Digits and noise may hide the difference of two tokens whose vectors nearly agree. So every token of a text that has
such a neighbour is replaced by it, and the update that this would make is compared:

    digits  it must lie outside of what was stored
    noise   it must differ from the replay by more than chance: ‖D‖/σ > 8, D the change and σ what the replay leaves

Limits: one token at a time, and the neighbours nearest by their vectors, as input or as label. Matrices of some blocks
are looked at. Cost: a pass for each text that has such a token, and one for each neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.attacks.gradients.noisy.text_weights import matrices_of
from unmask.attacks.gradients.replay.noisy_client import Loss
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.coarse import distance_to_cells
from unmask.models.adapter import Model
from unmask.protocols.replay import replay

_NEAR = 0.9  # cosine of two tokens' vectors: those of other tokens change an update by far more than a replay leaves
_MOST_NEAR = 3  # neighbours of a token that are tried
_APART = 8.0  # deviations of the noise
_OUTSIDE = 5e-5  # of a tensor's norm, as for any replay


@dataclass(frozen=True)
class ReplayedTexts:
    """Texts that the client was run on, the share that each has in the mean loss, and labels where texts have them."""

    texts: Sequence[tuple[int, ...]]
    shares: Sequence[float]
    again: Mapping[str, Tensor]
    labels: Sequence[int] | None = None


def find_confusable(evidence: GradientEvidence, model: Model, replayed: ReplayedTexts, loss: Loss) -> set[int]:
    """The places of texts that a token near one of theirs would explain as well."""
    names = matrices_of(evidence, model)
    near = _find_near(model, sorted({token for tokens in replayed.texts for token in tokens}))
    doubtful = {place for place, tokens in enumerate(replayed.texts) if any(token in near for token in tokens)}
    if not names:
        return doubtful
    part = evidence.only(*names)
    again = {name: replayed.again[name] for name in names}
    found = set()
    for place in sorted(doubtful):
        labels = None if replayed.labels is None else [replayed.labels[place]]
        own = replay(part, model, [replayed.texts[place]], labels=labels)
        for tokens in _replace(replayed.texts[place], near):
            other = replay(part, model, [tokens], labels=labels)
            changes = {name: replayed.shares[place] * (other[name] - own[name]).double() for name in names}
            if not _is_told(part, again, changes, loss):
                found.add(place)
                break
    return found


def _replace(tokens: tuple[int, ...], near: Mapping[int, list[int]]) -> Iterator[tuple[int, ...]]:
    """The text with one token replaced by a neighbour, in every way."""
    for place, token in enumerate(tokens):
        for other in near.get(token, []):
            yield (*tokens[:place], other, *tokens[place + 1 :])


def _is_told(part: GradientEvidence, again: Mapping[str, Tensor], changes: Mapping[str, Tensor], loss: Loss) -> bool:
    """Whether the update cannot be that of the changed text."""
    if loss is Loss.DIGITS:
        return any(
            float(distance_to_cells(seen, again[name].double() + changes[name]).norm()) > _OUTSIDE * float(seen.norm())
            for name, seen in part.gradients.items()
        )
    squares = 0.0
    for name, seen in part.gradients.items():
        sigma = float((seen.double() - again[name].double()).square().mean().sqrt())
        squares += float(changes[name].square().sum()) / max(sigma, 1e-300) ** 2
    return squares > _APART**2


@torch.no_grad()
def _find_near(model: Model, tokens: list[int]) -> dict[int, list[int]]:
    """Of each token the others whose vectors nearly agree with its own, as inputs or as labels."""
    every = torch.arange(model.vocab_size, device=model.device)
    inputs = model.first_input(every, torch.zeros_like(every))
    found: dict[int, list[int]] = {}
    for rows in (inputs, model.unembedding):
        if rows is not None:
            for token, others in zip(tokens, _nearest(rows.detach()[: model.vocab_size], tokens), strict=True):
                new = [other for other in others if other != token and other not in found.get(token, [])]
                found[token] = found.get(token, []) + new
    return {token: others for token, others in found.items() if others}


def _nearest(rows: Float[Tensor, "v d"], tokens: list[int]) -> list[list[int]]:
    unit = normalize(rows - rows.mean(0), dim=1)
    cosines = unit[tokens] @ unit.T
    cosines[torch.arange(len(tokens)), tokens] = -1
    best = cosines.topk(min(_MOST_NEAR, cosines.shape[1]), dim=1)
    near: Int[Tensor, "t k"] = best.indices
    return [
        [int(token) for token, cosine in zip(row, sizes, strict=True) if cosine > _NEAR]
        for row, sizes in zip(near, best.values, strict=True)
    ]
