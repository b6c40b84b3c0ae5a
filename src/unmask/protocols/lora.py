"""LoRA: the base model is frozen, the client trains two thin factors beside some layers. PEFT does it.

y = W·x + s·B·A·x, so ∂L/∂B = s·(∂L/∂Y)ᵀ·(X·Aᵀ) and ∂L/∂A = s·Bᵀ·(∂L/∂Y)ᵀ·X

Notation: X the layer's inputs and ∂L/∂Y the gradient at its outputs, one row for each token; A (r, d_in), B (d_out, r);
s = alpha/r. At initialisation B = 0: every ∂L/∂A is exactly zero, and only ∂L/∂B carries signal, through r random
projections of each input.

Source: Hu et al., LoRA, 2106.09685.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from unmask.errors import InputError
from unmask.evidence.captured import linear_sizes, plain_name
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.models.peft_adapters import scale_at
from unmask.protocols.batch import Texts
from unmask.protocols.client import Client, DataOptions, fix_seed
from unmask.protocols.local_training import LocalTraining


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
    local_steps: int = 0,
    optimizer: Literal["sgd", "adamw"] = "adamw",
    local_learning_rate: float = 5e-5,
    batch_size: int | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    train_mode: bool = False,
    seed: int = 0,
    **data: Unpack[DataOptions],
) -> GradientEvidence:
    """Gradients of the LoRA factors on `texts`, and the factors themselves, which the server sent and so knows.

    With `local_steps` the client trains for that many steps of its `optimizer`, and its factors' change is seen: what
    LLM federations send. `local_learning_rate`, `batch_size`, `weight_decay` and `max_grad_norm` are that training's.

    `targets` are roles of layers ('query', 'mlp_in', …) or ends of module names ('q_proj'). With `steps` = 0 the
    factors are PEFT's initial ones, as in the first round. Else they have been trained for that many AdamW steps on
    `earlier_texts`, which stand for the rounds before; if none are given, on the client's own texts. `train_mode` keeps
    dropout on, LoRA's own included. `data` are the options of `observe_gradients`; a head of the model's own stays
    frozen, a fresh one is trained along, and neither is shared.
    """
    training = check_lora(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        steps=steps,
        learning_rate=learning_rate,
        local_steps=local_steps,
        optimizer=optimizer,
        local_learning_rate=local_learning_rate,
        batch_size=batch_size,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )
    client = Client(model, texts, seed=seed, **data)
    modules = _modules(model, targets)
    ranks, alphas = dict.fromkeys(modules, rank), dict.fromkeys(modules, alpha)
    factors = _inject(client, ranks, alphas, dropout, seed)
    if steps:
        if earlier_texts is not None:
            data["labels"] = None
        earlier = Client(model, texts if earlier_texts is None else earlier_texts, seed=seed, **data)
        _inject(earlier, ranks, alphas, dropout, seed)
        before = LocalTraining(local_steps=steps, optimizer="adamw", learning_rate=learning_rate)
        before.run(earlier, train_mode=train_mode, seed=seed)
        client.load_state_dict(earlier.state_dict())
    sent = {name: factor.detach().clone() for name, factor in factors.items()}
    known = client.side_knowledge()
    if training is not None:
        known |= {
            "update": Update.DELTA,
            "learning_rate": training.rate,
            "num_steps": training.run(client, train_mode=train_mode, seed=seed),
            "optimizer": training.optimizer,
            "weight_decay": training.weight_decay,
            "momentum": 0.0,
            "local_batch_size": training.batch_size or len(texts),
        }
        seen = {name: factor.detach() - sent[name] for name, factor in factors.items() if factor.grad is not None}
    else:
        with fix_seed(seed):
            client.train(train_mode)
            seen = _gradients(client, factors)
    return GradientEvidence(
        gradients=seen,
        model_fingerprint=model.fingerprint(),
        task=client.task,
        num_texts=len(texts),
        compute_dtype=model.dtype,
        num_clients=1,
        adapter_scale=alpha / rank,
        **known,
        adapters=sent,
    )


def observe_lora_again(
    evidence: GradientEvidence, model: Model, texts: Texts, **data: Unpack[DataOptions]
) -> GradientEvidence:
    """The same on other texts, beside the factors that the evidence holds; a scale that it does not state is 1."""
    client = Client(model, texts, **data)
    down = {name.removesuffix(".lora_A.weight"): f for name, f in evidence.adapters.items() if ".lora_A." in name}
    ranks = {module: factor.shape[0] for module, factor in down.items()}
    alphas = {module: rank * scale_at(evidence.adapter_scale, module) for module, rank in ranks.items()}
    factors = _inject(client, ranks, alphas, 0.0, 0)
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_(evidence.adapters[name])
    if evidence.update is Update.DELTA:
        training = LocalTraining(
            local_steps=evidence.num_steps or 1,
            batch_size=evidence.local_batch_size,
            optimizer="sgd" if evidence.optimizer == "sgd" else "adamw",
            learning_rate=evidence.learning_rate,
            weight_decay=evidence.weight_decay or 0.0,
        )
        training.run(client, train_mode=False, seed=0)
        seen = {name: f.detach() - evidence.adapters[name] for name, f in factors.items() if f.grad is not None}
        return replace(evidence, gradients=seen, num_texts=len(texts))
    with torch.enable_grad():
        client.eval()
        return replace(evidence, gradients=_gradients(client, factors), num_texts=len(texts))


def _gradients(client: Client, factors: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients of the mean loss over all texts."""
    loss = client(client.batch(client.rows), client.rows).mean()
    gradients = torch.autograd.grad(loss, list(factors.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(factors, gradients, strict=True) if g is not None}


def _inject(
    client: Client, ranks: Mapping[str, int], alphas: Mapping[str, float], dropout: float, seed: int
) -> dict[str, nn.Parameter]:
    """Put fresh factors beside the client's layers and freeze the rest of its model; the factors by canonical name.

    `ranks` and `alphas` are by module.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError(f"LoRA needs PEFT ({error}); install it with: pip install 'unmask[lora]'") from None
    config = LoraConfig(
        lora_dropout=dropout,
        target_modules=list(ranks),
        rank_pattern={re.escape(module): rank for module, rank in ranks.items()},
        alpha_pattern={re.escape(module): alpha for module, alpha in alphas.items()},
    )
    with fix_seed(seed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT sets it for Conv1D by itself, and says so
        get_peft_model(client.hf, config)  # in place; the wrapper that it returns is not needed
    return {plain_name(name): parameter for name, parameter in client.shared_parameters([".lora_"]).items()}


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


def check_lora(
    *,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    steps: int = 0,
    learning_rate: float = 1e-3,
    local_steps: int = 0,
    optimizer: Literal["sgd", "adamw"] = "adamw",
    local_learning_rate: float = 5e-5,
    batch_size: int | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
) -> LocalTraining | None:
    """Refuse settings that do not go together; the local training that they mean, None where there is none."""
    if rank < 1 or steps < 0 or local_steps < 0:
        raise InputError(
            f"rank must be at least 1, steps and local_steps 0 or more, got {rank}, {steps} and {local_steps}"
        )
    for name, value in (("alpha", alpha), ("learning_rate", learning_rate)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be a finite number above 0, got {value}")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must lie in [0, 1), got {dropout}")
    training = LocalTraining(
        local_steps=local_steps or None,
        batch_size=batch_size,
        optimizer=optimizer,
        learning_rate=local_learning_rate,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )
    return training if local_steps else None
