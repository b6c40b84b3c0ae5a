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

_CLOSE = 1e-4  # relative: float32 leaves 1e-6


def layer_heads(model: Model, layer: int) -> HeadWeights:
    """The heads of one layer's attention module, all tokens at one position; W (h, d, d) and V (h, d, d).

        W_h = K_g Q_hᵀ·scale,   V_h = (values of group g)·(rows of the output projection that belong to head h)

    Limits: modules without biases, and whose queries and keys are linear in tokens; positions that are equal.
    """
    roles = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)
    parameters = dict(model.named_parameters())
    layers = [known for role in roles if (known := model.linear(role, layer)) is not None]
    if any(known.parameter.removesuffix("weight") + "bias" in parameters for known in layers):
        raise InputError(
            f"layer {layer} has biases, so it is no sum of heads alone; choose a model without, as SmolLM2"
        )
    weights = [weight for role in roles if (weight := model.weight(role, layer)) is not None]
    if len(weights) < len(roles) or not _is_bilinear(model, layer, weights):
        raise InputError(
            f"the scores of layer {layer} are more than products of linear queries and keys (norms, a bound, sinks), "
            "so it is no sum of heads alone; choose another model, as SmolLM2"
        )
    found = model.layout.blocks[layer].layout
    return heads_of(weights, found.num_heads, found.num_key_value_heads, model.scores_scale(layer))


@torch.no_grad()
def _is_bilinear(model: Model, layer: int, weights: Sequence[Float[Tensor, "d_in d_out"]]) -> bool:
    """Whether scores of tokens at one position are x·W·y, as the projections alone would have them."""
    if model.problem or model.scores(layer).softcap is not None or model.scores(layer).sinks is not None:
        return False
    rows = torch.randn(5, model.width, generator=torch.Generator().manual_seed(0)).to(weights[0])
    q, k, _ = model.queries_keys_values(layer, rows, torch.zeros(len(rows), dtype=torch.long, device=model.device))
    plain_q, plain_k = (rows @ weight for weight in weights[:2])
    if q.flatten(1).shape != plain_q.shape or k.flatten(1).shape != plain_k.shape:
        return False
    repeats = q.shape[1] // k.shape[1]
    scores, plain = (
        torch.einsum("nhe,mhe->hnm", queries, keys.repeat_interleave(repeats, dim=1))
        for queries, keys in ((q, k), (plain_q.view_as(q), plain_k.view_as(k)))
    )
    return bool(torch.allclose(scores, plain, atol=_CLOSE * float(scores.abs().max())))


def heads_of(
    weights: Sequence[Float[Tensor, "d_in d_out"]], num_heads: int, num_groups: int, scale: float
) -> HeadWeights:
    """Heads from the projections (d_in, d_out) of queries, keys, values and outputs; heads of a group share keys."""
    q, k, v, o = (weight.detach().double() for weight in weights)
    q, o = q.unflatten(1, (num_heads, -1)), o.unflatten(0, (num_heads, -1))
    k, v = (part.unflatten(1, (num_groups, -1)).repeat_interleave(num_heads // num_groups, dim=1) for part in (k, v))
    return HeadWeights(W=torch.einsum("dhe,fhe->hdf", k, q) * scale, v=torch.einsum("dhe,hef->hdf", v, o))
