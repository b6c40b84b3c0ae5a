"""LoRA: the base model is frozen, the client trains two thin factors beside some layers. PEFT does it.

y = W·x + s·B·A·x, so ∂L/∂B = s·(∂L/∂Y)ᵀ·(X·Aᵀ) and ∂L/∂A = s·Bᵀ·(∂L/∂Y)ᵀ·X

Notation: X the layer's inputs and ∂L/∂Y the gradient at its outputs, one row for each token; A (r, d_in), B (d_out, r);
s = alpha/r. At initialisation B = 0: every ∂L/∂A is exactly zero, and only ∂L/∂B carries signal, through r random
projections of each input.

Source: Hu et al., LoRA, 2106.09685.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from unmask.errors import InputError
from unmask.evidence.captured import linear_sizes, plain_name
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.protocols.batch import Texts
from unmask.protocols.client import Client, DataOptions, fix_seed


def observe_lora(
    model: Model,
    texts: Texts,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[Role | str] = ("query", "value"),
    dropout: float = 0.0,
    steps: int = 0,
    learning_rate: float = 1e-3,
    earlier_texts: Texts | None = None,
    train_mode: bool = False,
    seed: int = 0,
    **data: Unpack[DataOptions],
) -> GradientEvidence:
    """Gradients of the LoRA factors on `texts`, and the factors themselves, which the server sent and so knows.

    `targets` are roles of layers ('query', 'mlp_in', …) or ends of module names ('q_proj'). With `steps` = 0 the
    factors are PEFT's initial ones, as in the first round. Else they have been trained for that many AdamW steps on
    `earlier_texts`, which stand for the rounds before; if none are given, on the client's own texts. `train_mode` keeps
    dropout on, LoRA's own included. `data` are the options of `observe_gradients`; a head of the model's own stays
    frozen, a fresh one is trained along, and neither is shared.
    """
    _check(rank, alpha, dropout, steps, learning_rate)
    client = Client(model, texts, seed=seed, **data)
    modules = _modules(model, targets)
    factors = _inject(client, modules, rank, alpha, dropout, seed)
    if steps:
        if earlier_texts is not None:
            data["labels"] = None
        earlier = Client(model, texts if earlier_texts is None else earlier_texts, seed=seed, **data)
        _inject(earlier, modules, rank, alpha, dropout, seed)
        _train(earlier, steps, learning_rate, train_mode, seed)
        client.load_state_dict(earlier.state_dict())
    with fix_seed(seed):
        client.train(train_mode)
        loss = client(client.batch(client.rows), client.rows).mean()
        gradients = torch.autograd.grad(loss, list(factors.values()), allow_unused=True)
    return GradientEvidence(
        gradients={name: g.detach() for name, g in zip(factors, gradients, strict=True) if g is not None},
        model_fingerprint=model.fingerprint(),
        task=client.task,
        num_texts=len(texts),
        compute_dtype=model.dtype,
        num_clients=1,
        adapter_scale=alpha / rank,
        **client.side_knowledge(),
        adapters={name: factor.detach().clone() for name, factor in factors.items()},
    )


def observe_lora_again(
    evidence: GradientEvidence, model: Model, texts: Texts, **data: Unpack[DataOptions]
) -> GradientEvidence:
    """The same on other texts, beside the factors that the evidence holds; a scale that it does not state is 1."""
    client = Client(model, texts, **data)
    down = {name.removesuffix(".lora_A.weight"): f for name, f in evidence.adapters.items() if ".lora_A." in name}
    rank = next(iter(down.values())).shape[0]
    factors = _inject(client, list(down), rank, rank * (evidence.adapter_scale or 1.0), 0.0, 0)
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_(evidence.adapters[name])
    with torch.enable_grad():
        client.eval()
        loss = client(client.batch(client.rows), client.rows).mean()
        gradients = torch.autograd.grad(loss, list(factors.values()), allow_unused=True)
    seen = {name: g.detach() for name, g in zip(factors, gradients, strict=True) if g is not None}
    return replace(evidence, gradients=seen, num_texts=len(texts))


def _inject(
    client: Client, modules: list[str], rank: int, alpha: float, dropout: float, seed: int
) -> dict[str, nn.Parameter]:
    """Put fresh factors beside the client's layers and freeze the rest of its model; the factors by canonical name."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError(f"LoRA needs PEFT ({error}); install it with: pip install 'unmask[lora]'") from None
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules)
    with fix_seed(seed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT sets it for Conv1D by itself, and says so
        get_peft_model(client.hf, config)  # in place; the wrapper that it returns is not needed
    return {plain_name(name): parameter for name, parameter in client.shared_parameters([".lora_"]).items()}


def _train(client: Client, steps: int, learning_rate: float, train_mode: bool, seed: int) -> None:
    """Some AdamW steps on all of the client's texts."""
    trainable = [parameter for parameter in client.parameters() if parameter.requires_grad]
    descent = torch.optim.AdamW(trainable, learning_rate, weight_decay=0.0)
    batch = client.batch(client.rows)
    with fix_seed(seed):
        client.train(train_mode)
        for _ in range(steps):
            descent.zero_grad()
            client(batch, client.rows).mean().backward()
            descent.step()


def _modules(model: Model, targets: Sequence[Role | str]) -> list[str]:
    """Canonical names of the linear layers that the targets mean; PEFT finds them by how names end."""
    if isinstance(targets, (str, Role)):
        raise InputError(f"targets must be a list of roles or names, got {targets!r} alone; put it into a list")
    paths = list(linear_sizes(model))
    found: list[str] = []
    for target in targets:
        meant = _paths_of_role(model, target)
        matches = [path for path in paths if path in meant or f".{path}".endswith(f".{target}")]
        if not matches:
            raise InputError(
                f"no linear layer of this {model.family} model is meant by {target!r}; targets are roles "
                f"({', '.join(role.value for role in Role)}) or ends of module names, such as "
                f"{paths[0].rpartition('.')[2]!r}"
            )
        found += [path for path in matches if path not in found]
    if not found:
        raise InputError("targets must name at least one layer, got none")
    return found


def _paths_of_role(model: Model, target: Role | str) -> set[str]:
    if target not in [*Role, *(role.value for role in Role)]:
        return set()
    layers = (model.linear(Role(target), block) for block in range(model.num_blocks))
    return {layer.parameter.removesuffix(".weight") for layer in layers if layer is not None}


def _check(rank: int, alpha: float, dropout: float, steps: int, learning_rate: float) -> None:
    if rank < 1 or steps < 0:
        raise InputError(f"rank must be at least 1 and steps 0 or more, got {rank} and {steps}")
    for name, value in (("alpha", alpha), ("learning_rate", learning_rate)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be a finite number above 0, got {value}")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must lie in [0, 1), got {dropout}")
