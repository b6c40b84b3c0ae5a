"""What the server sees of clients: their updates behind defences, one by one or only as a sum."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from unmask.defences.aggregate import secure_aggregate
from unmask.defences.distortion import measure_distortion
from unmask.defences.table import Defence
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts
from unmask.protocols.table import ClientOptions, Protocol


@dataclass(frozen=True)
class ObservedUpdate:
    """The update that is seen, what defences and private noise leave of its direction, and the privacy budget.

    The budget is infinite without DP-SGD. The cosine is that of one client, before the sum.
    """

    evidence: GradientEvidence
    cosine: float
    epsilon: float
    delta: float


def observe_update(
    model: Model,
    texts: Texts,
    protocol: Protocol,
    defences: Sequence[Defence] = (),
    *,
    num_clients: int = 1,
    generator: torch.Generator,
    **options: Unpack[ClientOptions],
) -> ObservedUpdate:
    """Deal the texts to clients, let each make its update and defend it; of several only the sum is seen.

    `options` are those of the protocol (task, seed, padding …); the defences draw from `generator`.
    """
    if num_clients > len(texts) or (num_clients > 1 and protocol.name == "dpsgd"):
        raise InputError(
            f"{num_clients} clients need as many texts, and there are {len(texts)}; with dpsgd there must be one, as "
            "clients of one seed would draw the same noise"
        )
    updates = [protocol(model, texts[number::num_clients], **options) for number in range(num_clients)]
    sent = [functools.reduce(lambda seen, step: step(seen, generator), defences, u.evidence) for u in updates]
    # Noise of DP-SGD is a defence as well: it is measured against the plain gradient.
    plain = updates[0] if protocol.name != "dpsgd" else Protocol("fedsgd")(model, texts, **options)
    cosine = measure_distortion(plain.evidence, sent[0]).cosine if plain.evidence is not sent[0] else 1.0
    evidence = sent[0] if num_clients == 1 else secure_aggregate(sent)
    return ObservedUpdate(evidence, cosine, updates[0].epsilon, updates[0].delta)
