"""FedAvg: the client trains for some steps and sends its weights; the server subtracts those that it had sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts
from unmask.protocols.client import Client, DataOptions
from unmask.protocols.local_training import LocalTraining


def observe_fedavg(
    model: Model,
    texts: Texts,
    *,
    local_steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    learning_rate: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    train_mode: bool = False,
    parameters: Sequence[str] | None = None,
    share_learning_rate: bool = True,
    seed: int = 0,
    **data: Unpack[DataOptions],
) -> GradientEvidence:
    """What the server sees of a client that trains on `texts` before it answers: weights after minus weights before.

    Training lasts `epochs` passes or `local_steps` steps (one, if neither is said), over minibatches of `batch_size`
    texts (all of them), shuffled anew in each pass; the last one of a pass may be smaller. The learning rate is
    constant (0.01 for SGD, 5e-5 for AdamW if not given), weight decay is torch's own and acts on every parameter,
    gradients are clipped to `max_grad_norm` if given. `train_mode` keeps dropout on. `autocast` runs the forward pass
    in bfloat16 over weights of full precision: the evidence says bfloat16, in which every product was made, and its
    tensors are as precise as the weights. `data` are the options of `observe_gradients`; `parameters` keeps only
    deltas whose names contain one of them. Without `share_learning_rate` the adversary is not told it.

    The difference is taken in the precision of the weights, so it carries their rounding: half a unit in the last place
    of each weight, 3e-8 of it in float32, against a change of about learning rate × gradient.
    """
    training = LocalTraining(
        local_steps=local_steps,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        momentum=momentum,
        max_grad_norm=max_grad_norm,
        autocast=autocast,
    )
    client = Client(model, texts, seed=seed, **data)
    shared, known = client.shared_parameters(parameters), client.side_knowledge()
    num_steps = training.run(client, train_mode=train_mode, seed=seed)
    before = dict(model.named_parameters())
    return GradientEvidence(
        gradients={name: _delta(p, before[name]) for name, p in shared.items() if p.grad is not None},
        model_fingerprint=model.fingerprint(),
        task=client.task,
        num_texts=len(texts),
        update=Update.DELTA,
        compute_dtype=autocast or model.dtype,
        learning_rate=training.rate if share_learning_rate else None,
        num_steps=num_steps,
        optimizer=optimizer,
        weight_decay=weight_decay,
        num_clients=1,
        momentum=momentum,
        local_batch_size=batch_size or len(texts),
        **known,
    )


def _delta(after: Tensor, before: Tensor) -> Tensor:
    return after.detach() - before.detach()
