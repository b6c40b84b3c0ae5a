"""The first block with some of its MLP's hidden units.

A hidden unit is a function of the MLP's input alone, and of its own row in each of the MLP's first projections. So the
other units can be left out, and what is left is computed at a part of the cost.

Limits: projections that are linear layers of their own, one output a unit. The copy is compared with the whole on
random rows; where it differs, there is none.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unmask.models.adapter import Model
from unmask.models.blocks import Attended
from unmask.models.fused import copy_sharing_weights
from unmask.models.linear import Role

_NUM_ROWS = 4  # that are compared
_CLOSE = 1e-4  # of the largest entry


@torch.no_grad()
def keep_hidden_units(model: Model, units: Int[Tensor, " u"]) -> Model | None:
    """The model with these hidden units in block 0; None where units cannot be taken apart.

    All other weights are shared with the model.
    """
    from transformers.pytorch_utils import Conv1D

    kept = copy_sharing_weights(model)
    for role in (Role.MLP_IN, Role.MLP_GATE):
        layer = model.linear(role, 0)
        if layer is None:
            continue
        linear = kept.module(layer.module)
        if isinstance(linear, nn.Linear) and linear.out_features > int(units.max()):
            linear.weight = nn.Parameter(linear.weight[units], requires_grad=False)
            linear.out_features = len(units)
        elif isinstance(linear, Conv1D) and linear.nf > int(units.max()):
            linear.weight = nn.Parameter(linear.weight[:, units].contiguous(), requires_grad=False)
            linear.nf = len(units)
        else:
            return None
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias[units], requires_grad=False)
    return kept if _agree(model, kept, units) else None


def _agree(model: Model, kept: Model, units: Int[Tensor, " u"]) -> bool:
    """Whether the copy's hidden rows are those of the whole."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, _NUM_ROWS, model.width, generator=generator).to(model.device, model.dtype)
    try:
        whole, part = (each.mlp_hidden(0, Attended(*rows)) for each in (model, kept))
    except (RuntimeError, ValueError, TypeError):  # layers that know their width by another way
        return False
    wanted = whole[..., units] if whole.shape[-1] > int(units.max()) else whole
    return wanted.shape == part.shape and bool((wanted - part).abs().max() <= _CLOSE * whole.abs().max())
