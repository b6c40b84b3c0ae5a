"""Tensors that were captured elsewhere: names without wrappers, arrays as tensors, weights told from gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import EvidenceError
from unmask.evidence.tensor_files import StoredTensors, by_size, shapes_of
from unmask.evidence.tensors import as_floats
from unmask.models.adapter import Model

# Wrappers that put their name before those of the parameters: DDP, torch.compile, FSDP, Opacus.
_WRAPPERS = re.compile(r"^((_?module|_orig_mod|_fsdp_wrapped_module)\.)+|(?<=\.)(_orig_mod|_fsdp_wrapped_module)\.")
# Heads of transformers' classifiers, and parts of heads that predict tokens.
_CLASSIFIER = re.compile(r"(^|\.)(classifier|score|classification_head)(\.out_proj|\.dense)?\.weight$")
_PREDICTS_TOKENS = re.compile(r"(^|\.)(cls|lm_head|predictions|vocab_\w+|generator_\w+|mlm\w*)\.")
_SAMPLE = 4096  # entries of a tensor that are compared with its weights
_COSINE = 0.9  # a gradient's cosine with its own weights is about 1/√entries
_NORM_RATIO = 2.0
_ENOUGH, _EQUAL = 4, 1.2  # matrices, and how far their largest entries may differ: 1.03 after steps of Adam, 20 before
_FEW = 2  # matrices of a file that are compared with their weights before anything else is read
_MATRIX = 64  # entries from which a cosine of 0.9 is no chance: seven deviations


def name_tensors(model: Model, tensors: Any) -> dict[str, Tensor]:
    """Tensors by canonical name. Frozen layers, whose gradient is None, are left out; arrays become tensors."""
    if not isinstance(tensors, Mapping):
        raise EvidenceError(
            f"gradients must come with their names, got {type(tensors).__name__}; pass a dictionary, as "
            "{name: p.grad for name, p in model.named_parameters()}"
        )
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value is None:
            continue
        canonical = model.canonical_name(plain_name(_WRAPPERS.sub("", str(name))))
        if canonical in named:
            raise EvidenceError(f"two of the tensors are '{canonical}' (the second one as '{name}'); leave one out")
        named[canonical] = as_floats(str(name), value)
    if tensors and not named:
        raise EvidenceError("all gradients are None; call backward() first, and read them before zero_grad()")
    return named


def trains_classifier(model: Model, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an update is a classifier's: such a head moved, and there is none for tokens.

    What it says of a task that nobody stated: the token embedding is no output layer. A head that the model has and
    that did not move says nothing: the client may have trained for something else.
    """
    own = {name for name, _ in model.named_parameters()}
    beside = {name: shape for name, shape in shapes_of(tensors).items() if name not in own}
    names = own | set(beside)
    predicts_tokens = model.unembedding is not None or any(map(_PREDICTS_TOKENS.search, names))
    if predicts_tokens or any(model.vocab_size in shape for shape in beside.values()):
        return False
    return any(is_classifier(name) and bool(tensors[name].any()) for name in tensors)


def is_classifier(name: str) -> bool:
    """Whether a tensor is the weight of a classifier's head, as transformers names them."""
    return _CLASSIFIER.search(name) is not None


def refuse_weights(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are the model's own weights, or weights after a little training.

    One matrix is enough: no gradient is parallel to its weights and of their length. Of vectors alone, all must be.
    Of tensors that are read one at a time, the smallest few matrices are looked at.
    """
    shapes = shapes_of(gradients)
    known = [name for name in by_size(gradients) if name in weights and shapes[name] == tuple(weights[name].shape)]
    matrices = [name for name in known if len(shapes[name]) > 1 and torch.Size(shapes[name]).numel() >= _MATRIX]
    if isinstance(gradients, StoredTensors):
        matrices = matrices[:_FEW]
    seen = [name for name in matrices or known if _is_weight(gradients[name], weights[name])]
    if seen and (matrices or len(seen) == len(known)):
        raise EvidenceError(
            f"these are the model's weights, not gradients: '{seen[0]}' is almost equal to the parameter; pass the "
            "gradients (p.grad), or new − old with update='delta'"
        )


def seems_adams(gradients: Mapping[str, Tensor]) -> bool:
    """Whether the largest entries of all matrices are about equal.

    Adam moves the surest weights of each by its learning rate in every step. Gradients of different matrices differ
    many times over, unless they were cut to signs or scaled one by one.
    """
    matrices = [part for part in gradients.values() if part.ndim > 1 and part.numel() >= _MATRIX and bool(part.any())]
    largest = [float(part.abs().max()) for part in matrices]
    return len(largest) >= _ENOUGH and max(largest) < _EQUAL * min(largest)


def _is_weight(gradient: Tensor, weight: Tensor) -> bool:
    """Whether a sample of both has nearly one direction and one length."""
    step = max(1, gradient.numel() // _SAMPLE)
    g, w = (part.detach().flatten()[::step].double().cpu() for part in (gradient, weight))
    norms = float(g.norm()), float(w.norm())
    if not min(norms) > 0:
        return False
    return float(g @ w) > _COSINE * norms[0] * norms[1] and max(norms) < _NORM_RATIO * min(norms)


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
