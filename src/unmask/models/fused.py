"""Copies of a model that share its weights, and one of them whose activations are a single kernel each.

transformers writes GPT-2's GELU out, as eight passes over the hidden rows; torch has the same function as one. Where
millions of rows are made only to be refused, the eight take longer than the matrix products around them.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from unmask.models.adapter import Model

_WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")  # by name: importing them takes seconds


def copy_sharing_weights(model: Model) -> Model:
    """The model with modules of its own and the same weights."""
    shared: dict[int, Any] = {id(weights): weights for weights in model.hf.parameters()}
    return Model(copy.deepcopy(model.hf, shared), model.tokenizer, model.adapters, layout=model.layout)


def fuse_activations(model: Model) -> Model:
    """The model with quick activations, the same up to rounding; itself where it has no slow ones."""
    if not any(type(module).__name__ in _WRITTEN_OUT for module in model.hf.modules()):
        return model
    fused = copy_sharing_weights(model)
    for module in list(fused.hf.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in _WRITTEN_OUT:
                setattr(module, name, nn.GELU(approximate="tanh"))
    return fused
