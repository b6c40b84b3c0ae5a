"""One row of logits or log-probabilities is the last state in other coordinates: solve for the state.

    l = s·h·Eᵀ + b + c·1      (E − mean row)·h = (l − b − mean)/s,    by least squares in float64

E has many more rows (tokens) than columns, so that h is determined; c is unknown for log-probabilities (it is their
normaliser) and drops out with the mean. What is left over tells rows of another model, of another temperature with a
bias, or with noise.

Notation: h the state behind the final norm, E the output layer, b its bias, s the scale of logits.
Limits: a softcap bounds logits by a tanh, and with log-probabilities the constant in it is lost: refused. So are heads
with layers of their own.
Cost: one factorisation of the output layer's Gram matrix.
Source: Carlini et al., arXiv 2403.06634: logits lie in a space of the width's dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import EvidenceError, UnsupportedModelError
from unmask.evidence.tensors import as_tensor
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.linear import TokenHead
from unmask.models.load import require_model
from unmask.models.pooling import EmbeddingRecipe, Pooling, prefix_tokens

_LEFT_OVER = 1e-3  # of a row: float32 leaves 1e-6, float16 and bfloat16 up to 1e-3


@torch.no_grad()
def vectors_of_logits(model: Model, rows: Any, *, prefix: str = "") -> VectorEvidence:
    """Last states from full rows of logits or of log-probabilities, one row a prompt; `prefix` is known.

    Refused are rows that are not in the span of the model's output layer.
    """
    require_model(model, EvidenceError)
    head = _require_head(model)
    logits = as_tensor("rows", rows).to(model.device)
    logits = logits[None] if logits.ndim == 1 else logits
    if logits.ndim != 2 or logits.shape[1] != len(head.embedding) or not logits.is_floating_point():
        raise EvidenceError(
            f"rows must hold one number for each of the {len(head.embedding)} tokens of the output layer, got "
            f"{tuple(logits.shape)} of {logits.dtype}; of fewer tokens the state is not determined"
        )
    if not bool(logits.isfinite().all()):
        raise EvidenceError("the rows hold infinite values or NaN: tokens were masked; give rows without a mask")
    states = _solve(head, logits.double())
    recipe = EmbeddingRecipe(Pooling.LAST, False, prefix=prefix_tokens(model, prefix))
    return VectorEvidence(states.to(torch.float32), recipe, model.fingerprint(), model.dtype)


def _solve(head: TokenHead, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n d"]:
    """The states, and a refusal of rows that leave something over."""
    matrix = head.embedding.detach().double() * head.scale
    matrix = matrix - matrix.mean(0)
    seen = logits if head.bias is None else logits - head.bias.double() * head.scale
    seen = seen - seen.mean(1, keepdim=True)
    gram = matrix.T @ matrix
    states = torch.linalg.solve(gram, (seen @ matrix).T).T
    states = states + torch.linalg.solve(gram, ((seen - states @ matrix.T) @ matrix).T).T  # one refinement
    left = (seen - states @ matrix.T).norm(dim=1) / seen.norm(dim=1).clamp_min(1e-30)
    if float(left.max()) > _LEFT_OVER:
        raise EvidenceError(
            f"{100 * float(left.max()):.2g} % of row {int(left.argmax())} cannot come from this output layer, and "
            "rounding "
            f"explains at most {100 * _LEFT_OVER:g} %; the rows are from another model, or noise or a bias was added"
        )
    return states


def _require_head(model: Model) -> TokenHead:
    """The output layer, if logits are a linear map of the final state."""
    head = model.token_head if model.causal else None
    if head is None:
        raise UnsupportedModelError("this model has no output layer over the vocabulary behind a decoder")
    if head.softcap is not None:
        raise UnsupportedModelError(f"this model bounds its logits by a softcap of {head.softcap:g}, a tanh")
    probe = torch.randn(2, model.width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    features, states = head.features(probe), model.final_norm(probe)
    if features.shape != states.shape or not torch.allclose(features, states, rtol=1e-3, atol=1e-3):
        raise UnsupportedModelError("this model has layers between its final state and its output layer")
    return head
