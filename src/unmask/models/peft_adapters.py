"""A PEFT model as what it is made of: the base model, which the adapters are beside, and the LoRA factors.

y = W·x + s·B·(A·x): W belongs to the base, A and B to the server's adapters, s is alpha/rank.

Evidence is judged against the model that the client started from. So what PEFT trains is copied: the factors, and
modules that are trained as a whole. The frozen weights of the base are shared; a copy of a large model would cost as
much memory again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unmask.errors import UnsupportedModelError

_FACTORS = ("lora_A", "lora_B")
Scale = float | Mapping[str, float]  # alpha/rank: one for all modules, or one a module


@dataclass(frozen=True)
class Adapters:
    """LoRA factors by '<module>.lora_A.weight' and '<module>.lora_B.weight'; `scale` is by module where they differ."""

    factors: Mapping[str, Tensor]
    scale: Scale


def scale_at(scale: Scale | None, module: str) -> float:
    """The scale of a module's adapter; one that is not stated is 1."""
    found = scale.get(module) if isinstance(scale, Mapping) else scale
    return 1.0 if found is None else float(found)


def split_adapters(hf: Any) -> tuple[Any, Adapters | None]:
    """The base model and its adapters; a model without adapters comes back as it is.

    The base is a copy that shares its frozen weights with the PEFT model; they are trainable in the copy. The factors,
    and weights of the base that PEFT trains, are copied: they stay as they are when the PEFT model is trained on.
    """
    if hasattr(hf, "peft_config") and hasattr(hf, "get_base_model"):
        hf = hf.get_base_model()
    if not isinstance(hf, nn.Module):
        return hf, None
    wrapped = {name: module for name, module in hf.named_modules() if hasattr(module, "base_layer")}
    replaced = {name: module for name, module in hf.named_modules() if hasattr(module, "modules_to_save")}
    if not wrapped and not replaced:
        return hf, None
    factors: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    for name, module in wrapped.items():
        adapter = _active_adapter(name, module)
        for factor in _FACTORS:
            factors[f"{name}.{factor}.weight"] = getattr(module, factor)[adapter].weight.detach().clone()
        scales[name] = float(module.scaling[adapter])
    plain = _without({id(module): module.base_layer for module in wrapped.values()} | _find_copies(replaced), hf)
    if not factors:
        return plain, None
    first = next(iter(scales.values()))
    return plain, Adapters(factors, first if all(scale == first for scale in scales.values()) else scales)


def _active_adapter(name: str, module: Any) -> str:
    """The name of a layer's only adapter, which must be plain LoRA beside the layer and not inside its weights."""
    held = [getattr(module, factor, None) for factor in _FACTORS]
    if not all(isinstance(part, nn.ModuleDict) for part in held) or getattr(module, "lora_embedding_A", None):
        raise UnsupportedModelError(
            f"PEFT's {type(module).__module__.rpartition('.')[0].rpartition('.')[2]} at '{name}' cannot be read; "
            "LoRA on linear layers can"
        )
    if module.merged:
        raise UnsupportedModelError(
            f"the LoRA factors of '{name}' are merged into its weights; call unmerge_adapter() first"
        )
    active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    if len(active) != 1:
        raise UnsupportedModelError(f"'{name}' has {len(active)} active adapters; activate one with set_adapter()")
    if getattr(module, "use_dora", {}).get(active[0]):
        raise UnsupportedModelError(f"the adapter of '{name}' is DoRA, which cannot be read; plain LoRA can")
    if variant := getattr(module, "lora_variant", {}).get(active[0]):
        raise UnsupportedModelError(
            f"the adapter of '{name}' is a variant of LoRA ({type(variant).__name__}), which cannot be read; plain "
            "LoRA can"
        )
    if getattr(module, "lora_bias", {}).get(active[0]):
        raise UnsupportedModelError(
            f"the adapter of '{name}' has a bias beside its factors (lora_bias=True), which cannot be read; LoRA "
            "without it can"
        )
    return active[0]


def _find_copies(replaced: Mapping[str, Any]) -> dict[int, nn.Module]:
    """For each module that PEFT trains as a whole, the copy in use."""
    return {id(module): module.modules_to_save[module.active_adapters[0]] for module in replaced.values()}


def _without(wrappers: Mapping[int, nn.Module], hf: nn.Module) -> nn.Module:
    """A copy of the model, each wrapper replaced by what it is put around; frozen weights are shared, not copied."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach().clone() if weight.requires_grad else weight.detach())
        for weight in hf.parameters()
    }
    for wrapper, inner in wrappers.items():
        memo[wrapper] = copy.deepcopy(inner, memo)
    plain = copy.deepcopy(hf, memo)
    plain.__dict__.pop("peft_config", None)
    return plain
