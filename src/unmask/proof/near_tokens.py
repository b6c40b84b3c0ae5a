"""Tokens that could stand in another's place: the replay must tell each text from the same with a token near its own.

Digits and noise may hide a text, of which the model is sure, or the difference of two tokens whose vectors nearly
agree. So a token's share of each text's gradient is taken out, every token of a text that has such a neighbour is
replaced by it, and the update that this would make is compared:

    digits  it must lie outside of what was stored
    noise   it must fit worse than the replay by more than chance: (‖R − D‖² − ‖R‖²)/σ² > 8², D the change, R what the
            replay leaves and σ² the mean square of its entries

The last block's gradient tells most of them by forward passes; only the others need passes back as well.

Limits: one token at a time, and the neighbours nearest by their vectors, as input or as label. Down projections of some
blocks are looked at, or, without them, all matrices. After local steps the change is that of as many steps at the
weights that the server sent.
Cost: a forward pass for each neighbour; a whole pass for those that the last block does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.coarse import Storage, distance_to_cells, storage_of
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.proof.label_flow import flows_of, label_layer
from unmask.proof.noisy_agreement import Loss
from unmask.proof.replay import replay

_NEAR = 0.9  # cosine of two tokens' vectors: those of other tokens change an update by far more than a replay leaves
_MOST_NEAR = 3  # neighbours of a token that are tried
_APART = 8.0  # deviations of the noise
_OUTSIDE = 5e-5  # of a tensor's norm, as for any replay
_DEPTHS = (0.25, 0.5, 0.75)  # of the model: the blocks whose matrices are looked at
_TEXTS_AT_ONCE = 32


@dataclass(frozen=True)
class ReplayedTexts:
    """Texts that the client was run on, the share that each has in the mean loss, and labels where texts have them."""

    texts: Sequence[tuple[int, ...]]
    shares: Sequence[float]
    again: Mapping[str, Tensor]
    labels: Sequence[int] | None = None


def find_confusable(evidence: GradientEvidence, model: Model, replayed: ReplayedTexts, loss: Loss) -> set[int]:
    """The places of texts that one token less, or one near theirs, would explain as well."""
    names = matrices_of(evidence, model) or [name for name, part in evidence.gradients.items() if part.ndim == 2]
    near = _find_near(model, sorted({token for tokens in replayed.texts for token in tokens}))
    if not names:
        return set(range(len(replayed.texts)))
    step = 1 / gradient_scale(evidence)  # of the update, for each unit of the mean gradient
    part = replace(evidence.only(*names), update=Update.GRADIENT)
    matrices = [_Matrix.of(part.gradients[name], replayed.again[name], loss) for name in names]
    found = set()
    for place, text in enumerate(replayed.texts):
        share = step * replayed.shares[place]
        labels = None if replayed.labels is None else [replayed.labels[place]]
        own = replay(part, model, [text], labels=labels)
        if not _is_told(matrices, [-share / len(text) * own[name].double() for name in names]):
            found.add(place)
            continue
        others = list(_replace(text, near))
        others = _find_untold(evidence, model, replayed, place, others, share, loss) if others else []
        for tokens in others:
            other = replay(part, model, [tokens], labels=labels)
            if not _is_told(matrices, [share * (other[name] - own[name]).double() for name in names]):
                found.add(place)
                break
    return found


def _find_untold(
    evidence: GradientEvidence,
    model: Model,
    replayed: ReplayedTexts,
    place: int,
    others: list[tuple[int, ...]],
    share: float,
    loss: Loss,
) -> list[tuple[int, ...]]:
    """Those of the changed texts that the last block does not tell from the text itself."""
    role = label_layer(evidence, model)
    layer = None if role is None else model.linear(role, model.num_blocks - 1)
    if role is None or layer is None or model.token_head is None or evidence.task not in (None, Task.NEXT_TOKEN):
        return others
    seen, again = (layer.orient(part[layer.parameter]) for part in (evidence.gradients, replayed.again))
    matrix = _Matrix.of(seen, again, loss)
    text = replayed.texts[place]
    own = next(_label_gradients(model, role, [text]))
    gradients = _label_gradients(model, role, others)
    return [
        tokens
        for tokens, gradient in zip(others, gradients, strict=True)
        if not _is_told([matrix], [share * (gradient - own)])
    ]


def _label_gradients(model: Model, role: Role, texts: Sequence[tuple[int, ...]]) -> Iterator[Float[Tensor, "f d"]]:
    """Of each text the gradient of its mean loss at a layer of the last block, as (d_in, d_out)."""
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        for flow in flows_of(model, role, texts[begin : begin + _TEXTS_AT_ONCE]):
            yield flow.hidden.double().T @ flow.sent.double() / len(flow.hidden)


def gradient_scale(evidence: GradientEvidence) -> float:
    """What makes the mean gradient of a change of weights."""
    if evidence.update is not Update.DELTA:
        return 1.0
    return -1.0 / ((evidence.learning_rate or 1.0) * (evidence.num_steps or 1))


def matrices_of(evidence: GradientEvidence, model: Model) -> list[str]:
    """The down projections at some depths that the update holds."""
    blocks = sorted({int(depth * model.num_blocks) for depth in _DEPTHS})
    layers = [
        model.linear(Role.MLP_OUT, block) for block in blocks if evidence.linear(model, Role.MLP_OUT, block) is not None
    ]
    return [layer.parameter for layer in layers if layer is not None]


def _replace(tokens: tuple[int, ...], near: Mapping[int, list[int]]) -> Iterator[tuple[int, ...]]:
    """The text with one token replaced by a neighbour, in every way."""
    for place, token in enumerate(tokens):
        for other in near.get(token, []):
            yield (*tokens[:place], other, *tokens[place + 1 :])


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the update, the same of its replay, and what is left; how it was stored, where digits are lost."""

    seen: Tensor
    again: Tensor
    rest: Tensor
    variance: float
    storage: Storage | None

    @classmethod
    def of(cls, seen: Tensor, again: Tensor, loss: Loss) -> _Matrix:
        again = again.to(seen.device).double()
        rest = seen.double() - again
        storage = storage_of(seen) if loss is Loss.DIGITS else None
        return cls(seen, again, rest, max(float(rest.square().mean()), 1e-300), storage)

    def is_outside(self, change: Tensor) -> bool:
        """Whether the replay with a change would have been stored otherwise."""
        far = distance_to_cells(self.seen, self.again + change.to(self.again), self.storage)
        return float(far.norm()) > _OUTSIDE * float(self.seen.norm())

    def worse(self, change: Tensor) -> float:
        """How much worse a change fits, in squared deviations of the noise."""
        change = change.to(self.rest)
        return float(change.square().sum() - 2 * (change * self.rest).sum()) / self.variance


def _is_told(matrices: Sequence[_Matrix], changes: Sequence[Tensor]) -> bool:
    """Whether the update cannot be that of the changed text."""
    pairs = list(zip(matrices, changes, strict=True))
    if matrices[0].storage is not None:
        return any(matrix.is_outside(change) for matrix, change in pairs)
    return sum(matrix.worse(change) for matrix, change in pairs) > _APART**2


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
