"""Gradients of linear layers, compared without being formed: a few random combinations of their columns.

    G = XᵀΔ,   G·R = Xᵀ(Δ·R),   E‖(G − Ĝ)·R‖² = ‖G − Ĝ‖²

A replay needs ‖G − Ĝ‖, not Ĝ. R has few columns, so Ĝ·R costs next to nothing once X and Δ are there, while Ĝ costs as
much as a forward pass and has to be written to memory and read again.

Notation: X (n, a) inputs of a layer, Δ (n, b) what arrives at its outputs, G (a, b) its gradient; R (b, k) normal with
variance 1/k, by a seed that every entry of the update has a part in: whoever changes G where one R is blind meets
another R. Layers stored as (b, a) are sketched from the other side: Gᵀ·R = Δᵀ(X·R), R (a, k). Of an embedding, X has a
one at each row's token.
Limits: the estimated norm of a difference of rank 1 is a χ² with k degrees of freedom: with k = 16 it is less than a
tenth of the norm in one case of 10¹³. A weight that is used without its module being called has a sketch that is wrong:
who compares must be ready to form the gradient then. The seed is no cryptographic hash of tensors in memory: a forger
who searches long enough may find a change that no column sees.
Cost: a·b·k for each layer. Source: Freivalds' check of matrix products, with normal vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unmask.evidence.tensor_files import StoredTensors
from unmask.models.adapter import Model

_NUM_COLUMNS = 16


@dataclass(frozen=True)
class Sketch:
    """Ĝ·R of one layer, and R."""

    value: Float[Tensor, "m k"]
    ways: Float[Tensor, "l k"]

    def of(self, gradient: Float[Tensor, "m l"]) -> Float[Tensor, "m k"]:
        """The same of another gradient of that layer."""
        return gradient.detach() @ self.ways.to(gradient)


class GradientSketches:
    """Inside of this context, a backward pass leaves sketches of linear layers and embeddings, not their gradients.

    `owners` has the modules of each parameter that is sketched; tied weights have several.
    """

    def __init__(self, model: Model, names: Collection[str], seed: int = 0) -> None:
        held = {id(parameter): name for name, parameter in model.named_parameters() if name in names}
        self.owners: dict[str, list[nn.Module]] = {}
        for module in model.hf.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in held and parameter.ndim == 2:
                    self.owners.setdefault(held[id(parameter)], []).append(module)
        for name in [name for name, modules in self.owners.items() if not all(map(_can_sketch, modules))]:
            del self.owners[name]
        self._generator = torch.Generator().manual_seed(seed)
        self._ways: dict[int, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._trainable: dict[str, bool] = {}
        self._starts: list[Tensor] = []  # outputs of layers below which nothing is trained

    def __enter__(self) -> GradientSketches:
        for name, modules in self.owners.items():
            self._trainable[name] = _weight(modules[0]).requires_grad
            _weight(modules[0]).requires_grad_(False)
            self._handles += [module.register_forward_hook(self._watch(name)) for module in modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for name, modules in self.owners.items():
            _weight(modules[0]).requires_grad_(self._trainable[name])

    def send_back(self, loss: Tensor, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A backward pass: gradients of other parameters; what it leaves of the watched layers is added up."""
        starts, self._starts = self._starts, []
        gradients = torch.autograd.grad(loss, [*others.values(), *starts], allow_unused=True)[: len(others)]
        return {name: g for name, g in zip(others, gradients, strict=True) if g is not None}

    @property
    def sketches(self) -> dict[str, Sketch]:
        """What the backward passes have left, by parameter."""
        return {
            name: Sketch(value, self._ways_of(_weight(self.owners[name][0]))) for name, value in self._values.items()
        }

    def _watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:
                output = output.detach().requires_grad_()
                self._starts.append(output)
            given = inputs[0].detach()
            output.register_hook(lambda arrived: self._add(name, module, given, arrived))
            return output

        return keep

    @torch.no_grad()
    def _add(self, name: str, module: nn.Module, given: Tensor, arrived: Tensor) -> None:
        weight, delta = _weight(module), arrived.flatten(0, -2)
        ways = self._ways_of(weight)
        value = self._values.setdefault(name, weight.new_zeros(len(weight), ways.shape[1]))
        if isinstance(module, nn.Embedding):
            tokens = given.flatten()
            if module.padding_idx is not None:  # whose row gets no gradient
                tokens, delta = tokens[tokens != module.padding_idx], delta[tokens != module.padding_idx]
            value.index_add_(0, tokens, delta @ ways)
        else:
            rows = given.flatten(0, -2)
            left, right = (rows, delta) if _is_conv1d(module) else (delta, rows)
            value += left.T @ (right @ ways)

    def _ways_of(self, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        if width not in self._ways:
            ways = torch.randn(width, _NUM_COLUMNS, generator=self._generator) / _NUM_COLUMNS**0.5
            self._ways[width] = ways.to(weight)
        return self._ways[width]


def seed_of(update: Mapping[str, Tensor]) -> int:
    """A seed that follows from all entries: of a file by its digests, else by the sums of the entries' bits."""
    if isinstance(update, StoredTensors):
        told = [(name, update.file.digests.get(name, "")) for name in sorted(update)]
    else:
        told = [(name, str(_sum_of_bits(update[name]))) for name in sorted(update)]
    return int.from_bytes(hashlib.sha256(repr(told).encode("utf-8", "surrogatepass")).digest()[:7], "little")


def _sum_of_bits(tensor: Tensor) -> int:
    """Words of 64 bits add up exactly modulo 2⁶⁴, in whatever order and on whatever device; then the bytes left."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits
    whole = len(bits) - len(bits) % 8
    return int(bits[:whole].view(torch.int64).sum()) + int(bits[whole:].sum(dtype=torch.int64))


def _can_sketch(module: nn.Module) -> bool:
    """Whether the gradient of a module's matrix is what its inputs and outputs tell."""
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' layer that stores its matrix as (d_in, d_out)."""
    from transformers.pytorch_utils import Conv1D  # here, as audits of queries start faster without it

    return type(module) is Conv1D


def _weight(module: nn.Module) -> Tensor:
    return module.get_parameter("weight")
