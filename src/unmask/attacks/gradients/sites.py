"""Where an update lets a prefix be checked: a linear layer whose input row is a function of the prefix alone.

For a causal model, the row that enters a layer at position i depends on tokens 1…i. If the gradient of that layer
spans exactly the rows of the batch, 'is this prefix in the batch?' is one distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.noisy_tokens import error_variance
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.noisy_span import NoisySpan
from unmask.linalg.subspace import Span, column_span, span_above
from unmask.linalg.whitening import whiten
from unmask.models.adapter import Model
from unmask.models.linear import Role

# (model, stream entering block 0, mixed values of block 0) → rows entering the layer
RowsOf = Callable[[Model, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SpanSite:
    """A layer, the span of its gradient, and how its input follows from block 0's attention."""

    name: str
    span: Span
    rows: RowsOf
    parameters: tuple[str, ...]
    layers: tuple[tuple[Role, int], ...] = ()  # that share this input: their roles and blocks
    noise: NoisySpan | None = None  # what noise leaves of rows of the batch, where the span is one above noise


def why_no_first_inputs(model: Model) -> str:
    """Why no update of this model tells block 0's inputs; empty if one may."""
    if model.is_shared(0):
        return "the blocks share their weights, so that no gradient is block 0's alone"
    if all(model.linear(role, 0) is None for role in (Role.QUERY, Role.KEY, Role.VALUE)):
        return "no layer was found that makes queries, keys or values in block 0"
    return ""


def first_input_site(evidence: GradientEvidence, model: Model, floor: float | None = None) -> SpanSite | None:
    """Inputs of block 0's queries, keys and values, together: they decide which tokens occur.

    With a `floor`, here and below, the span is cut at that share of the largest singular value, not at a gap.
    """
    roles = (Role.QUERY, Role.KEY, Role.VALUE)
    return _site(evidence, model, "attention input of block 0", roles, 0, _never, floor)


def second_input_site(evidence: GradientEvidence, model: Model) -> SpanSite | None:
    """Inputs of block 1's queries, keys and values: a prefix passes the whole of block 0 on its way there."""
    if model.num_blocks < 2:
        return None
    roles = (Role.QUERY, Role.KEY, Role.VALUE)
    return _site(evidence, model, "attention input of block 1", roles, 1, _next_attention_input)


def output_site(evidence: GradientEvidence, model: Model, floor: float | None = None) -> SpanSite | None:
    """Attention outputs of block 0, before the output projection."""
    return _site(evidence, model, "output projection of block 0", (Role.ATTENTION_OUT,), 0, attention_output, floor)


def mlp_site(evidence: GradientEvidence, model: Model) -> SpanSite | None:
    """Inputs of block 0's MLP."""
    return _site(evidence, model, "MLP input of block 0", (Role.MLP_IN, Role.MLP_GATE), 0, _mlp_input)


def down_site(evidence: GradientEvidence, model: Model, floor: float | None = None) -> SpanSite | None:
    """Inputs of block 0's down projection: wider than the stream, so their span leaves room up to d rows."""
    return _site(evidence, model, "down projection of block 0", (Role.MLP_OUT,), 0, _mlp_hidden, floor)


def prefix_sites(evidence: GradientEvidence, model: Model) -> Iterator[SpanSite]:
    """Layers that can check a prefix, the cheapest first: each further one needs more of the forward pass."""
    first = output_site(evidence, model)
    if first is not None:
        yield first
    second = mlp_site(evidence, model)
    if second is not None:
        yield second
    third = second_input_site(evidence, model)
    if third is not None:
        yield third


def _site(
    evidence: GradientEvidence,
    model: Model,
    name: str,
    roles: tuple[Role, ...],
    block: int,
    rows: RowsOf,
    floor: float | None = None,
) -> SpanSite | None:
    gradients = {role: evidence.linear(model, role, block) for role in roles}
    present = {role: _as_computed(evidence, gradient) for role, gradient in gradients.items() if gradient is not None}
    if not present:
        return None
    layers = (model.linear(role, block) for role in present)
    names = tuple(dict.fromkeys(layer.parameter for layer in layers if layer is not None))
    span = column_span(*present.values()) if floor is None else span_above(*present.values(), floor=floor)
    return SpanSite(name, span, rows, names, tuple((role, block) for role in present))


def above_noise(evidence: GradientEvidence, model: Model, site: SpanSite) -> SpanSite:
    """The same layers with the directions of their gradients that stand out of noise or of few digits."""
    noise = noisy_span(evidence, model, site.layers, torch.float64)
    return site if noise is None else replace(site, span=noise.as_span(), noise=noise)


def noisy_span(
    evidence: GradientEvidence, model: Model, layers: Sequence[tuple[Role, int]], dtype: torch.dtype
) -> NoisySpan | None:
    """The directions above the noise of layers with one input; None if the update holds none of them."""
    gradients, variances = [], []
    for role, block in layers:
        layer, gradient = model.linear(role, block), evidence.linear(model, role, block)
        if layer is not None and gradient is not None:
            variance = error_variance(evidence, model, layer.parameter)
            gradients.append(gradient)
            variances.append(None if variance is None else layer.orient(variance))
    return NoisySpan.of(whiten(gradients, variances), dtype) if gradients else None


def _as_computed(evidence: GradientEvidence, gradient: Tensor) -> Tensor:
    """In the precision that it has: a client under autocast sends float32 tensors with the errors of bfloat16."""
    return gradient.bfloat16() if evidence.compute_dtype is torch.bfloat16 else gradient


def _never(model: Model, states: Tensor, mixed: Tensor) -> Tensor:
    raise NotImplementedError("inputs of block 0 depend on no attention; use Model.first_input")


def attention_output(model: Model, states: Tensor, mixed: Tensor) -> Tensor:
    """What attention reads is what the output projection is given: of all sites' rows, these alone are linear in it."""
    return mixed


def _mlp_input(model: Model, states: Tensor, mixed: Tensor) -> Tensor:
    return model.mlp_input(0, model.after_attention(0, states, mixed))


def _mlp_hidden(model: Model, states: Tensor, mixed: Tensor) -> Tensor:
    return model.mlp_hidden(0, model.after_attention(0, states, mixed))


def _next_attention_input(model: Model, states: Tensor, mixed: Tensor) -> Tensor:
    attended = model.after_attention(0, states, mixed)
    return model.attention_input(1, model.after_mlp(0, attended))
