"""A client's update out of its arrays: which of them are parameters of the model, and by how much they moved.

Arrays are named as the client's own model does ('bert.encoder…', 'classifier.weight'), clients of PEFT wrap further
prefixes around. No framework is needed: arrays are anything with `numpy()`. What else they say of themselves is
not used: those of Flower's older clients (`NumPyClient`) have neither shape nor type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.captured import is_classifier, linear_sizes, plain_name
from unmask.models.adapter import Model
from unmask.models.linear import Role

SHARES = ("weights", "delta", "gradient")
_LORA = ".lora_"


class Array(Protocol):
    """One array of a message."""

    def numpy(self) -> Any:
        """The array; read without pickle."""


Arrays = Mapping[str, Array]


def own_names(model: Model, names: Iterable[str]) -> dict[str, str]:
    """Names of arrays → canonical names of parameters, and of LoRA factors beside its linear layers.

    The prefix is the one under which most parameters are found. What the model does not have (a head that the client
    added, buffers) is left out.
    """
    known = {name for name, _ in model.named_parameters()}
    known |= {f"{module}{_LORA}{factor}.weight" for module in linear_sizes(model) for factor in "AB"}
    plain = {name: plain_name(name) for name in names}
    prefixes = Counter(prefix for name in plain.values() if (prefix := _prefix(name, known)) is not None)
    if not prefixes:
        return {}
    body = prefixes.most_common(1)[0][0]
    whole = body.removesuffix(f"{model.hf.base_model_prefix}.")
    found = {}
    for name, flat in plain.items():
        own = next((flat[len(p) :] for p in (body, whole) if flat.startswith(p) and flat[len(p) :] in known), None)
        if own is not None:
            found[name] = own
    return found


def _prefix(name: str, known: set[str]) -> str | None:
    parts = name.split(".")
    for start in range(len(parts)):
        if (own := ".".join(parts[start:])) in known:
            return name[: len(name) - len(own)]
    return None


def needed_names(model: Model) -> frozenset[str]:
    """Parameters that some attack reads: embeddings, block 0, inputs of block 1's attention, the last down projection.

    Of Llama-7B these are 1.7 GB instead of 27.
    """
    last = model.num_blocks - 1
    layers = [model.linear(role, 0) for role in Role] + [model.linear(Role.MLP_OUT, last)]
    if last > 0:
        layers += [model.linear(role, 1) for role in (Role.QUERY, Role.KEY, Role.VALUE)]
    embeddings = (model.token_embedding, model.position_embedding)
    return frozenset(
        [layer.parameter for layer in layers if layer is not None] + [name for name in embeddings if name is not None]
    )


def kept_names(model: Model, names: Iterable[str], keep: Sequence[str] | None = None) -> dict[str, str]:
    """Names of an update's tensors → canonical names, of those that are kept.

    `keep` are parts of names; None keeps what attacks need, and the head of a classifier, which tells what was trained.
    """
    names, needed = list(names), needed_names(model)

    def is_kept(own: str) -> bool:
        if keep is not None:
            return any(part in own for part in keep)
        return own in needed or _LORA in own or is_classifier(own)

    found = {**{name: name for name in filter(is_classifier, names)}, **own_names(model, names)}
    return {name: own for name, own in found.items() if is_kept(own)}


@torch.no_grad()
def place_weights(model: Model, sent: Arrays) -> bool:
    """Give the model the weights that the server sent; whether any of them is new. Others stay as they are."""
    names = own_names(model, sent)
    if not names:
        first = next(iter(sent), "none")
        raise EvidenceError(
            f"none of the {len(sent)} arrays that the server sent (first: {first!r}) is a parameter of this model; "
            "give the audit the model that the federation trains, and `names` where clients only number their arrays"
        )
    weights = {own: name for name, own in names.items() if _LORA not in own}
    parameters = dict(model.named_parameters())
    for own, name in weights.items():
        _require_shape(name, _tensor(sent[name]).shape, parameters[own].shape)
    changed = False
    for own, name in weights.items():
        value = _tensor(sent[name]).to(parameters[own])
        if not torch.equal(value, parameters[own]):
            parameters[own].copy_(value)
            changed = True
    return changed


def read_update(
    model: Model, sent: Arrays, received: Arrays, *, keep: Sequence[str] | None = None, shares: str = "weights"
) -> dict[str, Tensor]:
    """What the client changed, by canonical name; only of tensors that are kept (`kept_names`).

    Arrays of any type are subtracted in float32 or better, which is exact for weights that a few steps moved.
    """
    before = {**sent, **{own: sent[name] for name, own in own_names(model, sent).items()}}
    update = {}
    for name, own in kept_names(model, received, keep).items():
        value = _precise(received[name])
        if own in before:
            old = _precise(before[own])
            _require_shape(name, value.shape, old.shape)
            update[own] = value - old if shares == "weights" else value
        elif shares != "weights":
            update[own] = value
    return {} if all(map(is_classifier, update)) else update


def is_same(sent: Arrays, received: Arrays) -> bool:
    """Whether a client sent back exactly what it got, heads and buffers included."""
    return set(sent) == set(received) and all(
        torch.equal(_tensor(sent[name]), _tensor(received[name])) for name in sent
    )


def sent_factors(model: Model, sent: Arrays) -> dict[str, Tensor]:
    """The LoRA factors that the server sent."""
    return {own: _precise(sent[name]) for name, own in own_names(model, sent).items() if _LORA in own}


def sent_dtype(sent: Arrays) -> torch.dtype:
    """The float type of most arrays that the server sent, and so that of the client's weights."""
    types = Counter(_tensor(array).dtype for array in sent.values())
    most = types.most_common(1)[0][0] if types else torch.float32
    return most if most in (torch.float16, torch.float64) else torch.float32


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array.numpy())


def _precise(array: Array) -> Tensor:
    tensor = _tensor(array)
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _require_shape(name: str, seen: Iterable[int], expected: Iterable[int]) -> None:
    if tuple(seen) != tuple(expected):
        raise EvidenceError(
            f"the array {name!r} has the shape {tuple(seen)}, expected {tuple(expected)}; give the audit the model "
            "that the federation trains, and look whether the client flattens or packs its arrays"
        )
