"""Replay: run the client again on recovered texts, and compare every tensor of the update.

The adversary knows the weights, the loss and the protocol, so it can do what the client did:

    Ĝ = client(texts),   misfit = max over tensors ‖G − Ĝ‖ / ‖G‖

The right batch agrees to the precision of the evidence (3e-7 in float32). One wrong token, one text too many or too few
differs by 1e-2 and more. It needs no span and no gap, and it works for every protocol that can be stated.

Attacks import this room, which runs protocols as the secret's side does: it is handed evidence, a model and texts that
were recovered, and knows no secret.

Notation: G (a tensor of) the update, Ĝ the replayed one, s the factor that the update has on top of it.
Limits: settings that the evidence does not state are guessed as their defaults (no momentum, no decay, whole batches);
dropout and unknown minibatches cannot be replayed, and then the replay disagrees.
Cost: one client's work, of 1,000 local steps at most.
Source: measured for this project; least squares over texts is in `attacks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

from torch import Tensor

from unmask.errors import InputError, TooLargeError
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.evidence.tensor_files import StoredTensors
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.mapped import free_bytes
from unmask.proof.agreement import (
    Agreement,
    agree,
    agreement_of,
    exact_products,
    merge_rows,
    products_at_one,
    tolerance_of,
)
from unmask.proof.gradient_visits import only_trainable, visit_gradients
from unmask.proof.sketched_replay import SketchedClient, replay_sketched, run_client
from unmask.protocols.batch import TokenIds
from unmask.protocols.fedavg import observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.lora import observe_lora_again
from unmask.protocols.pairs import observe_pairs

_MOST_TEXTS = 4096  # unless the evidence states more
_MOST_STEPS = 1000  # of local training: a replay costs as much as the training did
_HELD = 3  # times the update: the replayed one, the weights that it moves and what their optimiser keeps


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
    client: SketchedClient | None = None,
    likely: dict[tuple[tuple[int, ...], int], float] | None = None,
) -> Agreement:
    """Run the client again and compare; with an update that is read by tensor, tensor by tensor.

    Else by sketches first: gradients are formed only where those do not agree. `client`: one that has run its forward
    passes; `likely` is told how likely labels were, where that comes for free.
    """
    if not can_visit(evidence):
        counts = Counter(tuple(text) for text in texts)
        is_quick = padding_side == "right" and not isinstance(evidence.gradients, StoredTensors)
        sketched = replay_sketched(evidence, model, counts, client, likely) if is_quick else None
        if sketched is not None:
            quick = agree(evidence, sketched, by_token=by_token, equal=equal)
            if quick.holds:
                return quick
        again = replay(evidence, model, texts, padding_side=padding_side)
        return agree(evidence, again, by_token=by_token, equal=equal)
    tolerance, products = tolerance_of(evidence), {}
    weights = dict(model.named_parameters())

    def compare(name: str, gradient: Tensor) -> None:
        if evidence.update is Update.DELTA:  # rounded as the difference of two weights is
            old = weights[name].detach()
            gradient = old.add(gradient, alpha=-float(evidence.learning_rate or 0.0)).sub_(old)
        pair = evidence.gradients[name], gradient
        merged = (merge_rows(pair[0], equal), merge_rows(pair[1], equal)) if name in by_token and equal else pair
        size = gradient.numel()
        quick = products_at_one(*merged, size)
        products[name] = quick if quick.distance(1.0) <= tolerance * quick.seen**0.5 else exact_products(*merged, size)

    visit_gradients(model, texts, frozenset(evidence.gradients), compare, padding_side=padding_side)
    return agreement_of(products, tolerance)


def run_forward(evidence: GradientEvidence, model: Model, texts: Sequence[TokenIds]) -> SketchedClient | None:
    """The client's forward passes over texts whose last labels are not known yet; None where it is not run so."""
    if isinstance(evidence.gradients, StoredTensors) or max(map(len, texts)) > model.max_positions:
        return None
    return run_client(evidence, model, [tuple(text) for text in texts])


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
    return "" if needed <= free else _describe_memory(needed, free)


def why_stopped(error: InputError) -> str:
    """What to say where a replay was refused: nothing where the stated client does not take these texts at all."""
    return _describe_memory(error.needed, error.free) if isinstance(error, TooLargeError) else ""


def _describe_memory(needed: int, free: int) -> str:
    return (
        f"running this client again takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free, so that "
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


def another_client(evidence: GradientEvidence) -> str:
    """What to say where the client was run again and sends another update."""
    dtype = str(evidence.compute_dtype).removeprefix("torch.")
    return (
        "no replay of them explains the whole update: texts are missing, or another client sent it than was run again "
        f"(in {dtype}; the rest as stated or as is usual)"
    )
