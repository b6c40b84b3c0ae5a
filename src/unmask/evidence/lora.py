"""Names and shapes of LoRA factors in an update: y = W·x + s·B·(A·x), with A (r, d_in) and B (d_out, r)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from unmask.errors import EvidenceError
from unmask.models.adapter import Model

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# PEFT's prefix, the adapter's name behind a factor, and the modules in which it puts layers.
_WRAPPED = re.compile(
    r"^base_model\.model\.|(?<=\.lora_[AB])\.[^.]+(?=\.weight$)|\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)"
)


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT wraps around it: its own prefix, the adapter's name, 'base_layer'."""
    return _WRAPPED.sub("", name)


def check_factors(model: Model, *parts: Mapping[str, Tensor]) -> set[str]:
    """Names of the LoRA factors among the tensors, once each fits its linear layer and the rank of its fellows."""
    found = [(name, part[name], match) for part in parts for name in part if (match := _FACTOR.fullmatch(name))]
    layers = linear_sizes(model) if found else {}
    ranks: dict[str, int] = {}
    for name, tensor, match in found:
        module, is_down = match["module"], match["factor"] == "A"
        if module not in layers:
            raise EvidenceError(
                f"'{name}' is a LoRA factor, but this model has no linear layer '{module}'; "
                "LoRA on embeddings or on another model's layers cannot be read"
            )
        shape, size = tuple(tensor.shape), layers[module][0 if is_down else 1]
        if len(shape) != 2 or shape[1 if is_down else 0] != size:
            expected = f"(rank, {size})" if is_down else f"({size}, rank)"
            raise EvidenceError(f"the LoRA factor '{name}' has shape {shape}, expected {expected}")
        rank = shape[0 if is_down else 1]
        if ranks.setdefault(module, rank) != rank:
            raise EvidenceError(f"the LoRA factors of '{module}' have ranks {ranks[module]} and {rank}")
    return {name for name, _, _ in found}


def linear_sizes(model: Model) -> dict[str, tuple[int, int]]:
    """(d_in, d_out) of every linear layer, by the canonical name of its module.

    nn.Linear stores (d_out, d_in), transformers' Conv1D (d_in, d_out).
    """
    sizes = {}
    for name, module in model.hf.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            d_in, d_out = reversed(weight.shape) if isinstance(module, nn.Linear) else weight.shape
            sizes[model.canonical_name(name)] = (int(d_in), int(d_out))
    return sizes
