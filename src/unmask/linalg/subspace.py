"""Spans of gradients: which vectors can be rows of X when only G = Xᵀ·∂L/∂Y is seen.

Every column of G is a combination of rows of X. If ∂L/∂Y has rank b, the number of distinct rows of X, the column
space of G *is* the row space of X, and 'is x a row of X?' becomes 'is the distance of x to the span zero?'

Notation: G (d, m) a gradient; b its numerical rank; U (d, b) an orthonormal basis of its column space.
Limits: b < d, or every vector passes. Rows with zero gradient are not in the span.
Source: DAGER, arXiv 2405.15586, Theorems 5.1 and 5.2. Rank and acceptance by gaps instead of fixed thresholds are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.errors import InputError
from unmask.shapes import Basis, Probes, Rows

# Below this fraction of the largest singular value a float64 eigendecomposition of GGᵀ shows rounding, not G.
_GRAM_FLOOR = 3e-8
# Directions above this fraction are taken from the first pass; the rest is decomposed again without them.
_DEFLATION_CUT = 1e-4
# Sketches of a fraction of the size are tried first; one is believed only if some of its directions stay unused.
_SKETCH_SHARES = (12, 3)
_BALANCING_STEPS = 8
_NEARLY_FULL = 4
_COARSE = 1e-4  # float types with larger rounding leave no gap in the spectrum
_OVERSAMPLING = 16
_ROUNDING = 1e-6  # float32 gradients: about ten roundings of the largest singular value
_MIN_SKETCH = 48


@dataclass(frozen=True)
class Span:
    """The column space of a gradient, with how clearly its dimension was decided.

    `max_rank` is the highest rank that the gradient could have shown, by its shape. `gap_decades` is log₁₀ of the ratio
    between the last kept and the first dropped singular value; `noise_floor` is the first dropped one, relative to the
    largest: what the evidence's own precision leaves of a zero. With a `row_scale` D the basis is that of D·G, and D·x
    is what is measured.
    """

    basis: Basis
    singular_values: Float[Tensor, " k"]
    max_rank: int
    gap_decades: float
    noise_floor: float
    row_scale: Float[Tensor, " d"] | None = None

    @property
    def rank(self) -> int:
        """Dimension of the span."""
        return self.basis.shape[1]

    @property
    def width(self) -> int:
        """Dimension of the space around it."""
        return self.basis.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether the gradient could not have shown a higher rank, so that rows may be missing from the span."""
        return self.rank >= self.max_rank

    @property
    def is_saturated(self) -> bool:
        """Whether it could hardly have: a norm layer takes a direction or two (LayerNorm: the mean) away."""
        return self.rank >= self.max_rank - _NEARLY_FULL

    def distance(self, rows: Rows) -> Float[Tensor, " n"]:
        """Relative distance ‖x − UUᵀx‖ / ‖x‖ of each row, in float64. Zero rows are at distance 1."""
        x = self.scale(rows)
        residual = x - (x @ self.basis) @ self.basis.T
        norms = x.norm(dim=-1)
        return torch.where(norms > 0, residual.norm(dim=-1) / norms, torch.ones_like(norms))

    def join(self, rows: Rows) -> Span:
        """The span with further directions in it; those that it holds already add nothing."""
        extra = self.scale(rows)
        for _ in range(2):  # twice is enough (Kahan)
            extra = extra - (extra @ self.basis) @ self.basis.T
        _, sizes, directions = torch.linalg.svd(extra, full_matrices=False)
        kept = directions[sizes > _ROUNDING * self.scale(rows).norm()]
        return replace(self, basis=torch.cat([self.basis, kept.T], dim=1))

    def at(self, entries: Int[Tensor, " m"]) -> Span:
        """The span of what some entries of its vectors hold."""
        frame, _ = torch.linalg.qr(self.basis[entries])
        scale = None if self.row_scale is None else self.row_scale[entries]
        return replace(self, basis=frame, row_scale=scale)

    def scale(self, rows: Rows) -> Rows:
        """What distances are taken of: the rows in float64, scaled as the basis is."""
        x = rows.to(self.basis.dtype)
        return x if self.row_scale is None else x * self.row_scale

    def probes(self, num_probes: int, generator: torch.Generator) -> Probes:
        """Random directions of the orthogonal complement, scaled so that ‖probesᵀx‖ estimates ‖x − UUᵀx‖.

        P = √((d − b)/k)·N·R with R a random (d − b, k) orthonormal matrix. A row of the span gives exactly zero.
        Cost: a test costs k·d instead of b·d multiplications.
        """
        codimension = self.width - self.rank
        num_probes = min(num_probes, codimension)
        if num_probes == 0:
            raise InputError(
                f"the span fills its space (rank {self.rank} of {self.width}): every vector passes, no probe exists"
            )
        noise = torch.randn(self.width, num_probes, generator=generator, dtype=torch.float64)
        noise = noise.to(self.basis.device)
        for _ in range(2):  # twice is enough (Kahan): what the first projection leaves by rounding, the second takes
            noise = noise - self.basis @ (self.basis.T @ noise)
        orthonormal, _ = torch.linalg.qr(noise)
        return self.scale((orthonormal * (codimension / num_probes) ** 0.5).T).T.contiguous()


def column_span(*gradients: Float[Tensor, "d m"], min_gap_decades: float = 1.0) -> Span:
    """Joint column space of gradients that share their input X, e.g. of queries, keys and values.

    Each gradient is scaled to norm 1 and all are concatenated: [G₁/‖G₁‖, G₂/‖G₂‖, …]. The rank is where the
    singular values fall by the largest factor; a fall of less than `min_gap_decades` decades counts as none, and
    then the span is full.
    Notation: see the module. Cost: two symmetric eigendecompositions of size min(d, m) in float64, or of a third of it.
    Deviation: the paper uses query gradients alone and a fixed cut; in causal attention the query gradient of a
    first token is exactly zero, and with grouped-query attention only the concatenation has enough columns.
    """
    stacked = _stack(gradients)
    if torch.finfo(gradients[0].dtype).eps > _COARSE:
        return _span_above_rounding(stacked, torch.finfo(gradients[0].dtype).eps)
    for share in _SKETCH_SHARES:
        span = _sketched_span(stacked, min(stacked.shape) // share, min_gap_decades)
        if span is not None:
            return span
    left, values = _left_singular(stacked)
    return _cut(left, values, min(stacked.shape), min_gap_decades)


def span_above(*gradients: Float[Tensor, "d m"], floor: float) -> Span:
    """The directions whose singular values are above a share of the largest, where the spectrum has no fall.

    Local training moves the weights, and with them the inputs: directions of the drift follow those of the rows without
    a gap. A cut at the rounding of float32 keeps the rows, and some drift beside them.
    """
    stacked = _stack(gradients)
    left, values = _left_singular(stacked)
    rank = int((values > floor * values[0]).sum()) if float(values[0]) > 0 else 0
    return Span(left[:, :rank].contiguous(), values, min(stacked.shape), 0.0, floor)


def _span_above_rounding(matrix: Float[Tensor, "d m"], eps: float) -> Span:
    """Of a gradient that was rounded to few digits: the directions that its rounding cannot have made.

    Rounding adds E with entries of standard deviation c·|G|, c ≈ 0.72·ε/√12 (mean over mantissas). Rows and columns are
    first scaled to equal norms, which balances E too; then ‖E‖ ≤ c·(row norm + column norm) up to a factor near 1
    (Bandeira, van Handel, arXiv 1408.6185), and the rank is the number of singular values above. Scaling columns leaves
    the span alone, scaling rows is undone by scaling every tested vector alike. No fall of the spectrum is asked for.
    """
    balanced, scale = _balance(matrix)
    left, values = _left_singular(balanced)
    edge = 0.72 * eps / 12**0.5 * float(balanced.norm(dim=1).max() + balanced.norm(dim=0).max())
    rank = int((values > edge).sum())
    gap = float((values[rank - 1] / values[rank]).log10()) if 0 < rank < len(values) else 0.0
    return Span(left[:, :rank].contiguous(), values, min(matrix.shape), gap, edge / float(values[0]), scale)


def _balance(matrix: Float[Tensor, "d m"]) -> tuple[Float[Tensor, "d m"], Float[Tensor, " d"]]:
    """D·G·C with rows and columns of equal norms (Sinkhorn's iteration on squares), and D."""
    scale = torch.ones_like(matrix[:, 0])
    for _ in range(_BALANCING_STEPS):
        columns = matrix.norm(dim=0)
        matrix = matrix[:, columns > 0] / columns[columns > 0]
        rows = matrix.norm(dim=1) * (len(matrix) / max(1, matrix.shape[1])) ** 0.5
        rows = torch.where(rows > 0, rows, torch.ones_like(rows))  # rows of zeros stay
        matrix, scale = matrix / rows[:, None], scale / rows
    return matrix, scale


def _cut(left: Tensor, values: Tensor, max_rank: int, min_gap_decades: float) -> Span:
    """The span of the directions before the largest fall of the spectrum."""
    rank, gap = rank_by_gap(values, min_gap_decades)
    floor = float(values[rank] / values[0]) if 0 < rank < len(values) else 0.0
    return Span(left[:, :rank].contiguous(), values, max_rank, gap, floor)


def _sketched_span(matrix: Float[Tensor, "d m"], k: int, min_gap_decades: float) -> Span | None:
    """The same span from k random directions of the column space, if its rank turns out to fit; else None.

    Y = GΩ with Ω a Gaussian (m, k) matrix spans the column space of G if its rank is at most k; the spectrum of QᵀG, Q
    an orthonormal basis of Y, then shows the same fall as that of G. Believed only if some of its directions stay
    unused and the weakest is at rounding level: otherwise the true fall may come later, where a sketch cannot see it.
    Source: Halko, Martinsson, Tropp, arXiv 0909.4061, Algorithm 4.1.
    """
    if k < _MIN_SKETCH:
        return None
    generator = torch.Generator(device=matrix.device).manual_seed(0)
    directions = torch.randn(matrix.shape[1], k, generator=generator, dtype=torch.float64, device=matrix.device)
    frame, _ = torch.linalg.qr(matrix @ directions)
    vectors, values = _left_singular(frame.T @ matrix)
    span = _cut(frame @ vectors, values, min(matrix.shape), min_gap_decades)
    at_rounding = bool(values[-1] <= _ROUNDING * values[0])
    return span if at_rounding and span.rank <= k - _OVERSAMPLING else None


def rank_by_gap(values: Float[Tensor, " k"], min_gap_decades: float = 1.0) -> tuple[int, float]:
    """Number of values before the largest fall of a descending spectrum, and that fall in decades.

    Returns (len(values), gap) when no fall reaches `min_gap_decades`, and (0, inf) when all values are zero.
    """
    largest = float(values[0])
    if largest == 0.0:
        return 0, float("inf")
    logs = torch.log10(values.clamp_min(largest * _GRAM_FLOOR * _DEFLATION_CUT))
    if len(values) == 1:
        return 1, 0.0
    falls = logs[:-1] - logs[1:]
    where = int(falls.argmax())
    gap = float(falls[where])
    return (where + 1, gap) if gap >= min_gap_decades else (len(values), gap)


def _stack(gradients: tuple[Tensor, ...]) -> Float[Tensor, "d m"]:
    """Gradients side by side in float64, each of norm 1; zero gradients carry nothing and are left out."""
    if not gradients:
        raise InputError("a span needs at least one gradient, got none")
    widths = {gradient.shape[0] for gradient in gradients}
    if len(widths) != 1:
        raise InputError(f"gradients of one input must have the same number of rows, got {sorted(widths)}")
    doubles = [gradient.double() for gradient in gradients]
    scaled = [g / g.norm() for g in doubles if g.norm() > 0]
    return torch.cat(scaled, dim=1) if scaled else torch.zeros_like(doubles[0])


def _left_singular(matrix: Float[Tensor, "d m"]) -> tuple[Float[Tensor, "d k"], Float[Tensor, " k"]]:
    """The k = min(d, m) left singular vectors and singular values, descending.

    GGᵀ squares the condition number: directions weaker than √ε come out mixed with strong ones. So the strong
    directions are taken first, projected out of G, and the remainder is decomposed by itself.
    """
    if matrix.shape[0] > matrix.shape[1]:
        frame, square = torch.linalg.qr(matrix)
        vectors, values = _left_singular(square)
        return frame @ vectors, values
    vectors, values = _gram_eigh(matrix)
    strong = int((values > _DEFLATION_CUT * values[0]).sum())
    if values[0] == 0 or strong == len(values):
        return vectors, values
    head, rest = vectors[:, :strong], vectors[:, strong:]
    remainder = rest.T @ matrix
    rotation, rest_values = _gram_eigh(remainder)
    return torch.cat([head, rest @ rotation], dim=1), torch.cat([values[:strong], rest_values])


def _gram_eigh(matrix: Float[Tensor, "d m"]) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]]:
    """Eigenvectors of GGᵀ and roots of its eigenvalues, descending, with rounding cut off at the floor."""
    eigenvalues, vectors = torch.linalg.eigh(matrix @ matrix.T)
    values = eigenvalues.clamp_min(0).sqrt().flip(0)
    floor = _GRAM_FLOOR * values[0]
    return vectors.flip(1), torch.where(values > floor, values, floor)
