"""FedAvg: the client trains for some steps and sends its weights; the server subtracts those that it had sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from unmask.arguments import require_count, require_number
from unmask.errors import InputError
from unmask.evidence.gradients import OPTIMIZERS, GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts
from unmask.protocols.client import Client, DataOptions, fix_seed

_LEARNING_RATES = {"sgd": 0.01, "adamw": 5e-5}  # AdamW's is that of transformers' Trainer


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
    check_fedavg(
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
    learning_rate = _LEARNING_RATES[optimizer] if learning_rate is None else learning_rate
    client = Client(model, texts, seed=seed, **data)
    shared, known = client.shared_parameters(parameters), client.side_knowledge()
    descent = _optimizer(client, optimizer, learning_rate, weight_decay, momentum)
    batch_size = batch_size or len(texts)
    num_steps = local_steps or 1 if epochs is None else epochs * math.ceil(len(texts) / batch_size)
    batches = _minibatches(len(texts), batch_size, torch.Generator().manual_seed(seed))
    with fix_seed(seed):
        client.train(train_mode)
        for step, rows in zip(range(num_steps), batches, strict=False):
            _step(client, rows, descent, max_grad_norm, autocast, step)
    before = dict(model.named_parameters())
    return GradientEvidence(
        gradients={name: _delta(p, before[name]) for name, p in shared.items() if p.grad is not None},
        model_fingerprint=model.fingerprint(),
        task=client.task,
        num_texts=len(texts),
        update=Update.DELTA,
        compute_dtype=autocast or model.dtype,
        learning_rate=learning_rate if share_learning_rate else None,
        num_steps=num_steps,
        optimizer=optimizer,
        weight_decay=weight_decay,
        num_clients=1,
        momentum=momentum,
        local_batch_size=batch_size,
        **known,
    )


def _step(
    client: Client,
    rows: list[int],
    descent: torch.optim.Optimizer,
    max_grad_norm: float | None,
    autocast: torch.dtype | None,
    step: int,
) -> None:
    """One step of the client's optimiser on some of its texts."""
    descent.zero_grad()
    batch = client.batch(rows)
    with nullcontext() if autocast is None else torch.autocast(batch.tokens.device.type, autocast):
        loss = client(batch, rows).mean()
    if not bool(loss.isfinite()):
        raise InputError(f"the local training diverged: the loss is {loss.item()} at step {step}; lower learning_rate")
    loss.backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(client.parameters(), max_grad_norm)
    descent.step()


def _minibatches(num_texts: int, batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Rows of one minibatch after the other, without end; a batch of all texts keeps their order."""
    while True:
        whole = batch_size >= num_texts
        order = list(range(num_texts)) if whole else torch.randperm(num_texts, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_texts, batch_size))


def _delta(after: Tensor, before: Tensor) -> Tensor:
    return after.detach() - before.detach()


def check_fedavg(
    *,
    local_steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: str = "sgd",
    learning_rate: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """Refuse settings that do not go together, before anything is computed."""
    if local_steps is not None and epochs is not None:
        raise InputError("training lasts either local_steps steps or epochs passes, and both were given; leave one out")
    for name, value in (("local_steps", local_steps), ("epochs", epochs), ("batch_size", batch_size)):
        require_count(name, value)
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    require_number("learning_rate", learning_rate, positive=True)
    require_number("weight_decay", weight_decay, positive=False)
    require_number("momentum", momentum, positive=False)
    require_number("max_grad_norm", max_grad_norm, positive=True)
    if momentum >= 1:
        raise InputError(f"momentum must be below 1, got {momentum}")
    if momentum and optimizer != "sgd":
        raise InputError(f"AdamW has moments of its own, so momentum must be left at 0, got {momentum}")
    if autocast not in (None, torch.bfloat16):
        raise InputError(f"autocast must be torch.bfloat16 or None, got {autocast}; float16 needs a scaled loss")


def _optimizer(
    client: Client, name: str, learning_rate: float, weight_decay: float, momentum: float
) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in client.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trainable, learning_rate, momentum=momentum, weight_decay=weight_decay)
    return torch.optim.AdamW(trainable, learning_rate, weight_decay=weight_decay)
