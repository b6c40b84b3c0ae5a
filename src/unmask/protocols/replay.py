"""Replay: run the client again on recovered texts, and compare every tensor of the update.

The adversary knows the weights, the loss and the protocol, so it can do what the client did:

    Ĝ = client(texts),   misfit = max over tensors ‖G − Ĝ‖ / ‖G‖

The right batch agrees to the precision of the evidence (3e-7 in float32). One wrong token, one text too many or too few
differs by 1e-2 and more. It needs no span and no gap, and it works for every protocol that can be stated.

This is the one module of the secret's side that attacks import: it is handed evidence, a model and texts that were
recovered, and knows no secret.

Notation: G (a tensor of) the update, Ĝ the replayed one, s the factor that the update has on top of it.
Limits: settings that the evidence does not state are guessed as their defaults (no momentum, no decay, whole batches);
dropout and unknown minibatches cannot be replayed, and then the replay disagrees.
Cost: one client's work, of 1,000 local steps at most.
Source: measured for this project; least squares over texts is in `attacks`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.evidence.tensor_files import StoredTensors
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.mapped import free_bytes
from unmask.protocols.batch import TokenIds
from unmask.protocols.fedavg import observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.gradient_visits import only_trainable, visit_gradients
from unmask.protocols.lora import observe_lora_again
from unmask.protocols.pairs import observe_pairs

__all__ = ["Agreement", "agree", "only_trainable", "replay"]
_FLOAT32 = 5e-5  # a right batch is within 5e-6 in float32; one token more among 3,000 changes every tensor by 3e-4
_FLOAT64 = 1e-7  # what differences of sums of squares can show
_TRAINED = 2e-3  # local steps in float32: a right batch is within 1e-4, a wrong one beyond 1e-1
_COARSE = 2e-2  # a client in bfloat16 rounds every product
_MOST_TEXTS = 4096  # unless the evidence states more
_MOST_STEPS = 1000  # of local training: a replay costs as much as the training did
_QUIET = 0.1  # of the typical entry: a tensor with smaller ones is mostly the rounding of larger terms (key biases)
_ENTRIES_AT_ONCE = 2**22
_HELD = 3  # times the update: the replayed one, the weights that it moves and what their optimiser keeps
_NORMALISED = 0.75  # the quantile of tensors that counts where Adam has blown up the rounding of gradients that are 0


@dataclass(frozen=True)
class Products:
    """⟨G, G⟩, ⟨G, Ĝ⟩ and ⟨Ĝ, Ĝ⟩ of one tensor, in float64, and its number of entries."""

    seen: float
    mixed: float
    again: float
    num_entries: int

    def distance(self, scale: float) -> float:
        """‖G − s·Ĝ‖."""
        return max(self.seen - 2 * scale * self.mixed + scale**2 * self.again, 0.0) ** 0.5


@dataclass(frozen=True)
class Agreement:
    """How well a replay fits the update: the largest relative difference of a tensor, and what would be too much.

    `scale` is the factor that fits best; where it is not 1, `misfit` says what is left if it is taken out, and
    `misfit_as_is` what is left if not.
    """

    misfit: float
    misfit_as_is: float
    scale: float
    tolerance: float
    worst: str
    num_tensors: int

    @property
    def holds(self) -> bool:
        """Whether the update is what these texts give, without any factor."""
        return self.num_tensors > 0 and self.misfit_as_is <= self.tolerance

    @property
    def holds_up_to_scale(self) -> bool:
        """Whether it is a positive multiple of that: clipped, or with an unknown learning rate."""
        return self.num_tensors > 0 and self.scale > 0 and self.misfit <= self.tolerance


def replay(
    evidence: GradientEvidence,
    model: Model,
    texts: Sequence[TokenIds],
    *,
    labels: Sequence[int] | None = None,
    padding_side: Literal["left", "right"] = "right",
) -> dict[str, Tensor]:
    """The update that the stated client sends if these are its texts; classification needs their labels."""
    if why := why_too_long(evidence):
        raise InputError(f"{why}; correct num_steps, or confirm the texts in another way")
    data: dict[str, Any] = {"task": evidence.task or Task.NEXT_TOKEN, "padding_side": padding_side}
    if evidence.task is Task.CLASSIFICATION:
        data.update(labels=labels, pooling=evidence.pooling, head=evidence.head)
    if evidence.adapters:
        again = observe_lora_again(evidence, model, texts, **data)
    elif evidence.update is Update.DELTA:
        again = observe_fedavg(
            model,
            texts,
            local_steps=evidence.num_steps or 1,
            batch_size=evidence.local_batch_size,
            optimizer="adamw" if evidence.optimizer == "adamw" else "sgd",
            learning_rate=evidence.learning_rate,
            weight_decay=evidence.weight_decay or 0.0,
            momentum=evidence.momentum or 0.0,
            **data,
        )
    else:
        with only_trainable(model, evidence.gradients):
            again = observe_gradients(model, texts, **data)
    return dict(again.gradients)


def replay_and_agree(
    evidence: GradientEvidence,
    model: Model,
    texts: Sequence[TokenIds],
    *,
    padding_side: Literal["left", "right"] = "right",
    by_token: Collection[str] = (),
    equal: Sequence[tuple[int, ...]] = (),
) -> Agreement:
    """Run the client again and compare; with an update that is read by tensor, tensor by tensor."""
    if not can_visit(evidence):
        again = replay(evidence, model, texts, padding_side=padding_side)
        return agree(evidence, again, by_token=by_token, equal=equal)
    tolerance, products = tolerance_of(evidence), {}
    weights = dict(model.named_parameters())

    def compare(name: str, gradient: Tensor) -> None:
        if evidence.update is Update.DELTA:  # rounded as the difference of two weights is
            old = weights[name].detach()
            gradient = old.add(gradient, alpha=-float(evidence.learning_rate or 0.0)).sub_(old)
        pair = evidence.gradients[name], gradient
        merged = (_merge(pair[0], equal), _merge(pair[1], equal)) if name in by_token and equal else pair
        quick = _products_at_one(*merged)
        products[name] = quick if quick.distance(1.0) <= tolerance * quick.seen**0.5 else _products(*merged)

    visit_gradients(model, texts, frozenset(evidence.gradients), compare, padding_side=padding_side)
    return agreement_of(products, tolerance)


def can_visit(evidence: GradientEvidence) -> bool:
    """Whether a stored update is compared tensor by tensor: one plain step of next-token training."""
    is_plain = evidence.optimizer in (None, "sgd") and not evidence.weight_decay and not evidence.momentum
    is_step = evidence.num_steps in (None, 1) and is_plain and evidence.learning_rate is not None
    is_known = evidence.update is Update.GRADIENT or is_step
    stored = isinstance(evidence.gradients, StoredTensors) and not evidence.adapters
    return stored and is_known and evidence.task in (None, Task.NEXT_TOKEN)


def why_too_large(evidence: GradientEvidence) -> str:
    """What to say of an update that can only be compared as a whole, and for which the memory is too small."""
    if not isinstance(evidence.gradients, StoredTensors):
        return ""
    needed, free = _HELD * evidence.gradients.num_bytes, free_bytes()
    if needed <= free:
        return ""
    return (
        f"running this client again takes {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free, so that "
        "it was not done"
    )


def replay_pairs(model: EncoderDecoder, pairs: Sequence[tuple[TokenIds, TokenIds]]) -> dict[str, Tensor]:
    """The gradient that a client of an encoder–decoder sends if these are its pairs."""
    return dict(observe_pairs(model, [(tuple(read), tuple(written)) for read, written in pairs]).gradients)


def can_replay(evidence: GradientEvidence, num_texts: int, *, by_tensor: bool = False) -> bool:
    """Whether the stated client does the same again: not where unknown minibatches were drawn, or noise was added.

    Nor where it would take too many steps, too much memory, or too many texts: a search that goes wrong counts a text a
    million times. `by_tensor`: the update is compared by `replay_and_agree`.
    """
    if not (by_tensor and can_visit(evidence)) and why_too_large(evidence):
        return False
    is_long = bool(why_too_long(evidence)) or num_texts > max(_MOST_TEXTS, evidence.num_texts or 0)
    if evidence.task is Task.MASKED_TOKEN or evidence.noise_std or is_long:
        return False
    return evidence.local_batch_size is None or evidence.local_batch_size >= num_texts


def why_too_long(evidence: GradientEvidence) -> str:
    """What to say of a client that states more local steps than are run again; empty where it does not."""
    if evidence.update is not Update.DELTA or (evidence.num_steps or 1) <= _MOST_STEPS:
        return ""
    return f"the client states {evidence.num_steps:,} local steps, and a replay runs {_MOST_STEPS:,} at most"


def why_not_replayed(evidence: GradientEvidence, *, by_tensor: bool = False) -> str:
    """Why the client was not run again, where it states too many steps or there is too little memory; else empty."""
    return why_too_long(evidence) or ("" if by_tensor and can_visit(evidence) else why_too_large(evidence))


def agree(
    evidence: GradientEvidence,
    again: Mapping[str, Tensor],
    *,
    tolerance: float | None = None,
    by_token: Collection[str] = (),
    equal: Sequence[tuple[int, ...]] = (),
) -> Agreement:
    """Compare an update with its replay, tensor by tensor; tensors that only one of them has are left out.

    Tensors `by_token` have a row for each token; rows of `equal` tokens are added up before they are compared.
    """
    pairs = {}
    for name in sorted(set(evidence.gradients) & set(again)):
        pair = evidence.gradients[name], again[name]
        pairs[name] = tuple(_merge(part, equal) for part in pair) if name in by_token and equal else pair
    tolerance = tolerance_of(evidence) if tolerance is None else tolerance
    quantile = _NORMALISED if evidence.optimizer == "adamw" else 1.0
    quick = agreement_of({name: _products_at_one(*pair) for name, pair in pairs.items()}, tolerance, quantile)
    if quick.holds:
        return quick
    return agreement_of({name: _products(*pair) for name, pair in pairs.items()}, tolerance, quantile)


def agreement_of(products: Mapping[str, Products], tolerance: float, quantile: float = 1.0) -> Agreement:
    """The agreement that products of tensors show; `quantile` 1 counts the worst tensor, less forgives the others."""
    total = sum(part.again for part in products.values())
    scale = sum(part.mixed for part in products.values()) / total if total > 0 else 0.0
    sizes = {name: (part.seen / part.num_entries) ** 0.5 for name, part in products.items() if part.num_entries}
    typical = statistics.median(sizes.values()) if sizes else 0.0

    def misfits(factor: float) -> dict[str, float]:
        floors = {name: _QUIET * typical * products[name].num_entries ** 0.5 for name in sizes}
        return {
            name: products[name].distance(factor) / max(products[name].seen ** 0.5, floors[name], 1e-300)
            for name in sizes
        }

    fitted, as_is = misfits(scale), misfits(1.0)
    if not sizes:
        return Agreement(float("inf"), float("inf"), scale, tolerance, "", 0)
    place = round(quantile * (len(sizes) - 1))
    worst = sorted(as_is, key=lambda name: as_is[name])[place]
    return Agreement(sorted(fitted.values())[place], as_is[worst], scale, tolerance, worst, len(sizes))


def tolerance_of(evidence: GradientEvidence) -> float:
    """The relative difference that the precision of an update leaves of a right batch."""
    if evidence.compute_dtype in (torch.bfloat16, torch.float16):
        return _COARSE
    if evidence.update is Update.DELTA:
        return _TRAINED
    return _FLOAT64 if _is_double(evidence) else _FLOAT32


def _is_double(evidence: GradientEvidence) -> bool:
    return evidence.compute_dtype is torch.float64 and all(
        g.dtype is torch.float64 for g in evidence.gradients.values()
    )


def _merge(tensor: Tensor, equal: Sequence[tuple[int, ...]]) -> Tensor:
    """Rows of equal tokens added up in the first of them."""
    merged = tensor.clone()
    for members in equal:
        merged[members[0]] = tensor[list(members)].sum(0)
        merged[list(members[1:])] = 0
    return merged


def _products_at_one(seen: Tensor, again: Tensor) -> Products:
    """By the norm of the difference, taken in the tensors' own precision: exact where the factor is 1, and quick."""
    of_seen = of_again = difference = 0.0
    for g, h in _pieces(seen, again):
        of_seen, of_again, difference = (
            total + float(torch.linalg.vector_norm(part, dtype=torch.float64).square())  # squares below 1e-38 count
            for total, part in ((of_seen, g), (of_again, h), (difference, g - h))
        )
    return Products(of_seen, (of_seen + of_again - difference) / 2, of_again, seen.numel())


def _products(seen: Tensor, again: Tensor) -> Products:
    """In float64: differences of 1e-7 must not drown in the sums."""
    sums = torch.zeros(3, dtype=torch.float64)
    for left, right in _pieces(seen, again):
        g, h = left.double(), right.double()
        sums += torch.stack([g @ g, g @ h, h @ h]).cpu()
    of_seen, mixed, of_again = sums.tolist()
    return Products(of_seen, mixed, of_again, seen.numel())


def _pieces(seen: Tensor, again: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors side by side, a part at a time."""
    parts = (part.detach().flatten().split(_ENTRIES_AT_ONCE) for part in (seen, again.to(seen.device)))
    return zip(*parts, strict=True)
