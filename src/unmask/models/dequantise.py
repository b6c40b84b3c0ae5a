"""A quantised model as a plain one: each layer is asked for its weights, whatever it stores.

A linear layer gives its weights away when it is given the unit vectors: W = f(I) − b. So nothing need be known of a
quantiser's format.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

_STATE = ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit")


def dequantise(hf: Any) -> Any:
    """A copy in which quantised linear layers are plain ones; all other weights are shared. A plain model as it is."""
    quantised = [module for module in hf.modules() if is_quantised(module)] if isinstance(hf, nn.Module) else []
    if not quantised:
        return hf
    float_type = next(weight.dtype for weight in hf.parameters() if weight.is_floating_point())
    memo: dict[int, Any] = {id(module): _plain(module, float_type) for module in quantised}
    memo |= {id(weight): weight for weight in hf.parameters()}
    memo |= {id(module.hf_quantizer): None for module in hf.modules() if hasattr(module, "hf_quantizer")}
    plain = copy.deepcopy(hf, memo)
    for module in plain.modules():
        for name in _STATE:
            module.__dict__.pop(name, None)
        if hasattr(module, "config") and hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
    return plain


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a linear layer that does not store its weights as floats."""
    if not hasattr(module, "in_features") or any(True for _ in module.children()):
        return False
    weight = getattr(module, "weight", None)
    return not isinstance(weight, torch.Tensor) or not weight.is_floating_point()


@torch.no_grad()
def _plain(module: Any, float_type: torch.dtype) -> nn.Linear:
    """y = x·Wᵀ + b of a layer that computes it in its own way, as it does in training.

    Without gradients bitsandbytes repacks weights for some CPUs, for good, and rounds what comes out to bfloat16.
    """
    device = next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    unit = torch.eye(module.in_features, dtype=float_type, device=device)
    bias = getattr(module, "bias", None)
    with torch.enable_grad():
        with_bias = module(unit.requires_grad_()).detach().to(float_type)
    layer = nn.Linear(module.in_features, module.out_features, bias is not None, device=device, dtype=float_type)
    if bias is not None:
        with_bias = with_bias - bias.to(with_bias)
        layer.bias.copy_(bias)
    layer.weight.copy_(with_bias.T)
    return layer.requires_grad_(True)
