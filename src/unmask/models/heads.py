"""The attention module of one layer as the list of its heads, each a pair of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights
from unmask.models.adapter import Model
from unmask.models.linear import Role


def layer_heads(model: Model, layer: int) -> HeadWeights:
    """The heads of one layer's attention module, all tokens at one position; W (h, d, d) and V (h, d, d).

        W_h = K_g Q_hᵀ·scale,   V_h = (values of group g)·(rows of the output projection that belong to head h)

    Limits: modules without biases; positions that are equal.
    """
    roles = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)
    parameters = dict(model.named_parameters())
    layers = [model.linear(role, layer) for role in roles]
    if any(known is not None and known.parameter.removesuffix("weight") + "bias" in parameters for known in layers):
        raise InputError(
            f"layer {layer} has biases, so it is no sum of heads alone; choose a model without, as SmolLM2"
        )
    weights = [model.weight(role, layer) for role in roles]
    return heads_of(
        [weight for weight in weights if weight is not None],
        model.num_heads,
        model.num_key_value_heads,
        model.scores_scale(layer),
    )


def heads_of(
    weights: Sequence[Float[Tensor, "d_in d_out"]], num_heads: int, num_groups: int, scale: float
) -> HeadWeights:
    """Heads from the projections (d_in, d_out) of queries, keys, values and outputs; heads of a group share keys."""
    q, k, v, o = (weight.detach().double() for weight in weights)
    q, o = q.unflatten(1, (num_heads, -1)), o.unflatten(0, (num_heads, -1))
    k, v = (part.unflatten(1, (num_groups, -1)).repeat_interleave(num_heads // num_groups, dim=1) for part in (k, v))
    return HeadWeights(W=torch.einsum("dhe,fhe->hdf", k, q) * scale, v=torch.einsum("dhe,hef->hdf", v, o))
