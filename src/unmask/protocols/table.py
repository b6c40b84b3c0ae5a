"""The table of protocols: how a client makes its update, by name, as in `fedavg:local_steps=4,learning_rate=0.01`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Unpack

from unmask.evidence.gradients import OPTIMIZERS
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts
from unmask.protocols.client import DataOptions
from unmask.protocols.dpsgd import PrivateUpdate, check_dpsgd, observe_dpsgd
from unmask.protocols.fedavg import observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.local_training import LocalTraining
from unmask.protocols.lora import check_lora, observe_lora
from unmask.specs import Kind, Spec, number, one_of, whole_number

PROTOCOLS: Mapping[str, Kind] = {
    "fedsgd": Kind("fedsgd", "one gradient of the whole batch", observe_gradients),
    "fedavg": Kind(
        "fedavg:local_steps=4,learning_rate=0.01",
        "local training; weights after minus weights before",
        observe_fedavg,
        (
            whole_number("local_steps", 1, default=1),
            whole_number("epochs", 1, default=None),
            whole_number("batch_size", 1, default=None),
            one_of("optimizer", OPTIMIZERS, default="sgd"),
            number("learning_rate", default=None),
            number("weight_decay", default=0.0),
            number("momentum", default=0.0),
            number("max_grad_norm", default=None),
        ),
        LocalTraining,
    ),
    "dpsgd": Kind(
        "dpsgd:noise_multiplier=0.5,max_grad_norm=1,dataset_size=1000",
        "each text's gradient clipped, noise added (Opacus)",
        observe_dpsgd,
        (
            number("noise_multiplier", default=1.0, always_written=True),
            number("max_grad_norm", default=1.0, always_written=True),
            number("sample_rate", default=None),
            whole_number("dataset_size", 1, default=None),
            whole_number("steps", 1, default=None),
            number("delta", default=1e-5),
        ),
        check_dpsgd,
    ),
    "lora": Kind(
        "lora:rank=8",
        "gradients of low-rank adapters only, or their change after local steps (PEFT)",
        observe_lora,
        (
            whole_number("rank", 1, default=8, always_written=True),
            number("alpha", default=16.0),
            number("dropout", default=0.0),
            whole_number("steps", 0, default=0),
            number("learning_rate", default=1e-3),
            whole_number("local_steps", 0, default=0),
            one_of("optimizer", OPTIMIZERS, default="adamw"),
            number("local_learning_rate", default=5e-5),
            whole_number("batch_size", 1, default=None),
            number("weight_decay", default=0.0),
            number("max_grad_norm", default=None),
        ),
        check_lora,
    ),
}


class ClientOptions(DataOptions, total=False):
    """What clients of every protocol take beside the protocol's own settings."""

    train_mode: bool
    parameters: Sequence[str] | None
    seed: int


class Protocol(Spec):
    """A protocol with its settings: a model and texts in, an update out."""

    noun: ClassVar[str] = "protocol"
    table: ClassVar[Mapping[str, Kind]] = PROTOCOLS

    def __call__(self, model: Model, texts: Texts, **options: Unpack[ClientOptions]) -> PrivateUpdate:
        """The update that the server sees, and the privacy budget that it spent (infinite without DP-SGD)."""
        update = self.kind.make(model, texts, **self.given, **options)
        return update if isinstance(update, PrivateUpdate) else PrivateUpdate(update, float("inf"), 0.0)


def parse_protocol(text: str) -> Protocol:
    """The protocol that a text names."""
    return Protocol.parse(text)
