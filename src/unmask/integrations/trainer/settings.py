"""What a server knows of a training because it wrote the settings: precision, optimizer, learning rate, decay, steps.

Only what evidence can hold is stated, and only what was the same in every step of a round. An optimizer that had
taken steps before the round is not stated: its moments are the client's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

Settings = Mapping[str, Any]


def compute_dtype(args: Any, model: nn.Module) -> torch.dtype:
    """The precision of the forward pass."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def read_optimizer(optimizer: Any) -> Settings:
    """The settings of one step, under the names that evidence gives them; of an unknown optimizer none."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    groups = getattr(inner, "param_groups", [])
    rates = {float(group["lr"]) for group in groups}
    if len(rates) != 1 or not min(rates) > 0:
        return {}
    settings = {"learning_rate": rates.pop(), "weight_decay": max(float(group["weight_decay"]) for group in groups)}
    if type(inner) is torch.optim.AdamW:
        return {**settings, "optimizer": "adamw"}
    if type(inner) is torch.optim.SGD:
        return {**settings, "optimizer": "sgd", "momentum": max(float(group["momentum"]) for group in groups)}
    return {}


def join_steps(steps: Sequence[Settings], *, is_fresh: bool) -> dict[str, Any]:
    """What a round's steps share, and their number. `is_fresh`: the optimizer began with the round."""
    if not steps:
        return {}
    shared = {name: value for name, value in steps[0].items() if all(step.get(name) == value for step in steps)}
    keeps_moments = shared.get("optimizer") == "adamw" or shared.get("momentum")
    if keeps_moments and not is_fresh:
        shared = {}
    return {**shared, "num_steps": len(steps)}
