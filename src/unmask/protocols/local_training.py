"""What a client does between two messages: some steps of an optimiser on minibatches of its texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from unmask.arguments import require_count, require_number
from unmask.errors import InputError
from unmask.evidence.gradients import OPTIMIZERS
from unmask.progress import track
from unmask.protocols.client import Client, fix_seed

_LEARNING_RATES = {"sgd": 0.01, "adamw": 5e-5}  # AdamW's is that of transformers' Trainer


@dataclass(frozen=True)
class LocalTraining:
    """How long, on how much at once, and by which rule; settings that do not go together are refused."""

    local_steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.local_steps is not None and self.epochs is not None:
            raise InputError(
                "training lasts either local_steps steps or epochs passes, and both were given; leave one out"
            )
        for name in ("local_steps", "epochs", "batch_size"):
            require_count(name, getattr(self, name))
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        require_number("learning_rate", self.learning_rate, positive=True)
        require_number("weight_decay", self.weight_decay, positive=False)
        require_number("momentum", self.momentum, positive=False)
        require_number("max_grad_norm", self.max_grad_norm, positive=True)
        if self.momentum >= 1:
            raise InputError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise InputError(f"AdamW has moments of its own, so momentum must be left at 0, got {self.momentum}")
        if self.autocast not in (None, torch.bfloat16):
            raise InputError(
                f"autocast must be torch.bfloat16 or None, got {self.autocast}; float16 needs a scaled loss"
            )

    @property
    def rate(self) -> float:
        """The learning rate, the optimiser's usual one if none is given."""
        return _LEARNING_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate

    def run(self, client: Client, *, train_mode: bool, seed: int) -> int:
        """Train the client in place; the number of steps."""
        num_texts = len(client.sequences)
        size = self.batch_size or num_texts
        num_steps = self.local_steps or 1 if self.epochs is None else self.epochs * math.ceil(num_texts / size)
        descent = self._make_optimizer(client)
        batches = _minibatches(num_texts, size, torch.Generator().manual_seed(seed))
        with fix_seed(seed):
            client.train(train_mode)
            for step, rows in zip(track(range(num_steps), "training the client"), batches, strict=False):
                self._step(client, rows, descent, step)
        return num_steps

    def _step(self, client: Client, rows: list[int], descent: torch.optim.Optimizer, step: int) -> None:
        """One step of the client's optimiser on some of its texts."""
        descent.zero_grad()
        batch = client.batch(rows)
        with nullcontext() if self.autocast is None else torch.autocast(batch.tokens.device.type, self.autocast):
            loss = client(batch, rows).mean()
        if not bool(loss.isfinite()):
            raise InputError(
                f"the local training diverged: the loss is {loss.item()} at step {step}; lower learning_rate"
            )
        loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(client.parameters(), self.max_grad_norm)
        descent.step()

    def _make_optimizer(self, client: Client) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in client.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trainable, self.rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return torch.optim.AdamW(trainable, self.rate, weight_decay=self.weight_decay)


def _minibatches(num_texts: int, batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Rows of one minibatch after the other, without end; a batch of all texts keeps their order."""
    while True:
        whole = batch_size >= num_texts
        order = list(range(num_texts)) if whole else torch.randperm(num_texts, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_texts, batch_size))
