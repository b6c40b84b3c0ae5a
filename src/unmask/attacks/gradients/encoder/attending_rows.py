"""Rows of the first block that attend to weighted places: what probes see of them, and how that moves with the weights.

With places of weights w, row i reads o_h = Σ_j w_j·e_ij·v_j / Σ_j w_j·e_ij, head by head, and a probe of a layer behind
is a function of o, with the slope ∂r/∂o. So

    ∂r/∂w_j = Σ_h ∂r/∂o_h·(v_j − o_h)·e_ij/denominator

is a product of two thin matrices. It is kept as such: products with it cost rows·c·d, and only columns that are asked
for are written out.

Notation: i rows, c chosen places, h heads of width e; k probes in all; e_ij = e^{q_i·k_j} up to a factor for each row.
Cost: slopes take rows·k·d·f for the MLP's down projection; s columns take rows·k·d·s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.sites import SpanSite
from unmask.models.adapter import Model
from unmask.models.hidden_units import keep_hidden_units
from unmask.shapes import Probes

_FEW_UNITS = 0.8  # of all: with more of them, little is saved
_NUM_SAMPLED = 64  # columns that tell the norm of all


@dataclass(frozen=True)
class ProbedLayer:
    """A layer and directions of the orthogonal complement of its gradient's span; `model` computes the layer's rows.

    A model with some hidden units alone (`models/hidden_units.py`) makes rows of the down projection cheap.
    """

    site: SpanSite
    probes: Probes
    model: Model | None = None  # the relaxation's own


def probe_layer(
    model: Model, site: SpanSite, num_probes: int, generator: torch.Generator, *, is_hidden: bool
) -> ProbedLayer:
    """Random probes of a layer; of the MLP's hidden units (`is_hidden`), of no more units than they need.

    Rows of the batch, restricted to u of the f units, have a span of the same rank r: u − r probes vanish on it. The
    units are those that the rows of the batch use most.
    """
    num_units = site.span.rank + num_probes
    if is_hidden and site.noise is None and site.span.row_scale is None and num_units < _FEW_UNITS * site.span.width:
        units = site.span.basis.norm(dim=1).topk(num_units).indices.sort().values
        small = keep_hidden_units(model, units)
        if small is not None:
            span = replace(site.span, basis=torch.linalg.qr(site.span.basis[units])[0])
            return ProbedLayer(site, span.probes(num_probes, generator).to(model.dtype), small)
    return ProbedLayer(site, site.span.probes(num_probes, generator).to(model.dtype))


@dataclass(frozen=True)
class Jacobian:
    """∂r/∂w of all probes at all rows, row by row, as the product of slopes and values."""

    slopes: Float[Tensor, "i k h e"]
    outputs: Float[Tensor, "i h e"]
    shares: Float[Tensor, "i h c"]
    values: Float[Tensor, "c h e"]

    def apply(self, weights: Float[Tensor, " c"]) -> Float[Tensor, " m"]:
        """J·w."""
        weighted = self.shares * weights
        moved = torch.einsum("ihc,che->ihe", weighted, self.values) - weighted.sum(-1, keepdim=True) * self.outputs
        return (self.slopes.flatten(2) @ moved.flatten(1)[..., None]).flatten()

    def pull_back(self, residual: Float[Tensor, " m"]) -> Float[Tensor, " c"]:
        """Jᵀ·r."""
        by_row = residual.unflatten(0, self.slopes.shape[:2])
        pulled = (by_row[:, None] @ self.slopes.flatten(2))[:, 0].unflatten(1, self.outputs.shape[1:])  # (i, h, e)
        along = torch.einsum("ihe,che->ihc", pulled, self.values) - (pulled * self.outputs).sum(-1, keepdim=True)
        return (self.shares * along).sum((0, 1))

    def columns(self, chosen: Int[Tensor, " s"]) -> Float[Tensor, "m s"]:
        """Some columns."""
        moved = self.values[chosen][None] - self.outputs[:, None]  # (i, s, h, e)
        moved = moved * self.shares[:, :, chosen].transpose(1, 2)[..., None]
        return (self.slopes.flatten(2) @ moved.flatten(2).transpose(1, 2)).flatten(0, 1)

    def dense(self) -> Float[Tensor, "m c"]:
        """All columns."""
        return self.columns(torch.arange(len(self.values), device=self.values.device))

    @cached_property
    def column_norm(self) -> float:
        """The typical norm of a column: root of the mean square over some of them."""
        count = len(self.values)
        sample = torch.arange(0, count, max(1, count // _NUM_SAMPLED), device=self.values.device)
        return max(float(self.columns(sample).norm()) / len(sample) ** 0.5, 1e-30)


@dataclass(frozen=True)
class AttendingRows:
    """Rows with their streams and e^{q·k} to every chosen place, up to a factor for each row and head."""

    model: Model
    probed: Sequence[ProbedLayer]
    values: Float[Tensor, "c h e"]
    states: Float[Tensor, "i d"]
    attention: Float[Tensor, "i h c"]

    def residual(self, weights: Float[Tensor, " c"]) -> Float[Tensor, " m"]:
        """Values of all probes at all rows, row by row."""
        _, mixed = self.mix(weights)
        rows = [self._row(layer, mixed.flatten(1)) @ layer.probes for layer in self.probed]
        return torch.cat(rows, dim=-1).flatten()

    def linearise_at(self, weights: Float[Tensor, " c"]) -> tuple[Float[Tensor, " m"], Jacobian]:
        """The residual and ∂r/∂w."""
        scaled, mixed = self.mix(weights)
        # Each layer alone: the output projection's probes need no way through the MLP.
        residuals, slopes = zip(*(self._slope(layer, mixed) for layer in self.probed), strict=True)
        return torch.cat(residuals, 1).flatten(), Jacobian(torch.cat(slopes, 1), mixed, scaled, self.values)

    def mix(self, weights: Float[Tensor, " c"]) -> tuple[Float[Tensor, "i h c"], Float[Tensor, "i h e"]]:
        """Attention over its denominators, and the attention outputs."""
        scaled = self.attention / (self.attention * weights).sum(-1, keepdim=True).clamp_min(1e-30)
        return scaled, torch.einsum("ihc,che->ihe", scaled * weights, self.values)

    def _slope(
        self, layer: ProbedLayer, mixed: Float[Tensor, "i h e"]
    ) -> tuple[Float[Tensor, "i k"], Float[Tensor, "i k h e"]]:
        """A layer's probes at all rows, and their derivatives by the attention outputs."""
        rows, pull_back = torch.func.vjp(lambda outputs: self._row(layer, outputs.flatten(1)), mixed)[:2]
        (slopes,) = torch.func.vmap(pull_back)(layer.probes.T[:, None].expand(-1, len(mixed), -1))
        return rows.detach() @ layer.probes, slopes.transpose(0, 1)

    def _row(self, layer: ProbedLayer, mixed: Float[Tensor, "i o"]) -> Float[Tensor, "i f"]:
        """The rows that enter a layer."""
        return layer.site.rows(layer.model or self.model, self.states, mixed)
