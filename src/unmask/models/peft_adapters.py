"""A PEFT model as what it is made of: the base model, which the adapters are beside, and the LoRA factors.

y = W·x + s·B·(A·x): W belongs to the base, A and B to the server's adapters, s is alpha/rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unmask.errors import UnsupportedModelError

_FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Adapters:
    """LoRA factors by '<module>.lora_A.weight' and '<module>.lora_B.weight'; `scale` is None where layers differ."""

    factors: Mapping[str, Tensor]
    scale: float | None


def split_adapters(hf: Any) -> tuple[Any, Adapters | None]:
    """The base model and its adapters; a model without adapters comes back as it is.

    The base is a copy that shares its weights with the PEFT model; they are trainable in the copy.
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
    scales = set()
    for name, module in wrapped.items():
        adapter = _active_adapter(name, module)
        for factor in _FACTORS:
            factors[f"{name}.{factor}.weight"] = getattr(module, factor)[adapter].weight.detach()
        scales.add(float(module.scaling[adapter]))
    plain = _without({id(module): module.base_layer for module in wrapped.values()} | _find_copies(replaced), hf)
    return plain, Adapters(factors, scales.pop() if len(scales) == 1 else None) if factors else None


def _active_adapter(name: str, module: Any) -> str:
    """The name of a layer's only adapter, which must be plain LoRA beside the layer and not inside its weights."""
    if not all(hasattr(module, factor) for factor in _FACTORS) or getattr(module, "lora_embedding_A", None):
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
    return active[0]


def _find_copies(replaced: Mapping[str, Any]) -> dict[int, nn.Module]:
    """For each module that PEFT trains as a whole, the copy in use."""
    return {id(module): module.modules_to_save[module.active_adapters[0]] for module in replaced.values()}


def _without(wrappers: Mapping[int, nn.Module], hf: nn.Module) -> nn.Module:
    """A copy of the model, each wrapper replaced by what it is put around; weights are shared, not copied."""
    memo: dict[int, Any] = {id(weight): nn.Parameter(weight.detach()) for weight in hf.parameters()}
    for wrapper, inner in wrappers.items():
        memo[wrapper] = copy.deepcopy(inner, memo)
    plain = copy.deepcopy(hf, memo)
    plain.__dict__.pop("peft_config", None)
    return plain
