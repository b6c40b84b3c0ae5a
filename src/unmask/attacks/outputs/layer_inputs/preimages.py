"""Pre-images: inputs that give exactly the output that was seen, each with what is proved about it.

    ‖J⁻¹‖ ≤ β,  η = ‖J⁻¹r‖ + rounding,  h = β K η ≤ ½   ⇒   an exact pre-image lies within `radius` of X,
                                                             and no other one within `unique_within`

For large systems β comes without a factorisation: J = (F ⊗ I)(I + E), and if ‖E‖ ≤ e < 1 then β ≤ ‖F⁻¹‖/(1 − e). The
blocks of (F ⊗ I)E have norms a_im = f_im‖r_im‖‖z_i‖ + δ_im‖Cov_i Wᵀ‖, so e = ‖ |F⁻¹|·a ‖₂ will do.

There is no gauge: with V of full rank no transformation of X leaves F(X)·X·V as it is for all X, so two pre-images are
the same only if they are equal.

B is only known up to `output_error`, its rounding at the least. Its part in Y is added to η, and J is that of the whole
problem: then for *every* output that near one exact pre-image lies within `radius`. The row space of Y splits that J:
J = (A, C; 0, F ⊗ I), A that of the reduced problem, so ‖J⁻¹‖ ≤ ‖(α, αcφ; 0, φ)‖, α = ‖A⁻¹‖, φ = ‖F⁻¹‖, c ≥ ‖C‖.
Lengths outside the row space may be divided by any t ≤ 1: with T = QQᵀ + t(I − QQᵀ) the map X ↦ F(XT)·X is that of
TWT, C becomes t·C, errors of Y grow to 1/t at the most, and a ball
there lies in one of the same radius here, and holds one of t times it.

Notation: as in `linalg/softmax_attention.py` and `solvers/kantorovich.py`.
Limits: float64 with a rounding floor, not interval arithmetic. A degenerate pre-image (J singular: repeated tokens,
uniform attention) gets no certificate.
Cost: one SVD of J up to `dense_limit` unknowns; n³ + n²r² beyond.
Source: solvers/kantorovich.py; the bound on ‖E‖ is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, Posed
from unmask.linalg.attention_bounds import jacobian_lipschitz
from unmask.linalg.softmax_attention import AttentionPoint
from unmask.solvers.kantorovich import RootCertificate, certify_root

_LARGEST_BALL = 1e90  # cubes of it, times a few norms, are finite in float64
_DENSE_WHOLE = 600  # unknowns up to which J is built with its part outside the row space
_SCALES = (1.0, 0.3, 0.1)  # t
_SAME = 1e-6  # relative distance below which two converged points are one root


@dataclass(frozen=True)
class Preimage:
    """One input with F(X)·X·V = B.

    `residual` is ‖F(X)·X·V − B‖/‖B‖. `orientation` is the sign of det J: where sym(W) ≻ 0 the signs of all
    pre-images add up to 1. `certified` says that `radius` and `unique_within` (Frobenius norms) are proved.
    """

    X: Float[Tensor, "n d"]
    residual: float
    radius: float
    unique_within: float
    inverse_norm: float
    orientation: int

    @property
    def certified(self) -> bool:
        """Whether an exact pre-image is proved to lie within `radius`, and to be alone there."""
        return math.isfinite(self.radius)


@dataclass(frozen=True)
class Preimages:
    """All distinct pre-images that were found, and how hard they were looked for.

    `definite`: sym(W) ≻ 0 where it matters, so the number of pre-images is odd. `proved_complete`: that there are no
    others is proved, not only not found. `budget_ended`: a causal search was cut short. `unseen`: a row of a causal
    layer leaves its token open, as rounding hides how much it attends to itself. `normed`: the rows have the norms that
    are known; `num_refused` others had not. `symmetric`: a symmetry of the layer may give others with the same norms.
    """

    preimages: tuple[Preimage, ...] = ()
    num_starts: int = 0
    num_converged: int = 0
    definite: bool = False
    proved_complete: bool = False
    budget_ended: bool = False
    unseen: bool = False
    normed: bool = False
    num_refused: int = 0
    symmetric: bool = False

    @property
    def X(self) -> Float[Tensor, "n d"]:
        """The first pre-image: the one that the output itself leads to, if it leads to one."""
        return self.preimages[0].X

    @property
    def degree(self) -> int:
        """Sum of the orientations; 1 if sym(W) ≻ 0 and none is missing."""
        return sum(preimage.orientation for preimage in self.preimages)

    def __len__(self) -> int:
        return len(self.preimages)


def merge_roots(roots: Iterable[Float[Tensor, " m"]], size: float) -> tuple[Float[Tensor, " m"], ...]:
    """Distinct ones of converged points, in order; `size` is that of a typical point, by which distances are judged."""
    kept: list[Tensor] = []
    for root in roots:
        if all(float((root - other).norm()) > _SAME * size for other in kept):
            kept.append(root)
    return tuple(kept)


def certify(posed: Posed, problem: AttentionProblem, x: Float[Tensor, " m"], dense_limit: int) -> Preimage:
    """A converged point with its certificate; errors of B may leave the row space, so they need the whole problem.

    The orientation is that of the problem given: the degree is a theorem about it.
    """
    point = problem.point(x)
    bounded = inverse_bound(point)
    if bounded is None and problem.size <= dense_limit:
        bounded = _dense_inverse(problem.jacobian(x))
    inverse_norm, orientation = bounded or (math.inf, 0)
    X = problem.lift(x)
    if posed.output_error > 0 and problem.Y.shape != posed.Y.shape:
        proofs = [_whole_proof(posed, problem, X, inverse_norm, scale) for scale in _SCALES]
        proof = min(proofs, key=lambda proof: proof.radius)
        inverse_norm = min(each.inverse_norm / scale for each, scale in zip(proofs, _SCALES, strict=True))
    else:
        proof = _proof(posed, problem, point, inverse_norm)
    return Preimage(X, posed.residual(X), proof.radius, proof.unique_within, inverse_norm, orientation)


def _whole_proof(
    posed: Posed, reduced: AttentionProblem, X: Float[Tensor, "n d"], inverse_norm: float, scale: float
) -> RootCertificate:
    """For the whole problem at a point of the row space, lengths outside of which are divided by a scale t ≤ 1."""
    inside = reduced.basis @ reduced.basis.mT
    T = inside + scale * (torch.eye(len(inside), dtype=inside.dtype) - inside)
    whole = posed.whole_problem()
    scaled = replace(whole, W=T @ whole.W @ T)
    point = scaled.map.at(X)
    proof = _proof(posed, scaled, point, _whole_inverse(scaled, point, inverse_norm), scale)
    return replace(proof, unique_within=scale * proof.unique_within)


def _proof(
    posed: Posed, problem: AttentionProblem, point: AttentionPoint, inverse_norm: float, scale: float = 1.0
) -> RootCertificate:
    """Newton–Kantorovich at a point, for the output as it was given: rounding of Y = B V⁺ is in the floor."""
    eps = torch.finfo(torch.float64).eps
    scores = float((point.Z @ point.X.mT).abs().max())
    size_of_X, size_of_Y = float(point.X.norm()), float(problem.Y.norm())
    floor = eps * ((problem.size**0.5 + posed.value_condition) * size_of_Y + 4 * scores * size_of_X)
    residual = float((point.mixed - problem.Y).norm()) + posed.mixed_error
    width = float(torch.linalg.matrix_norm(problem.W, 2))
    longest, n = float(point.X.norm(dim=1).max()), len(point.X)

    def lipschitz(radius: float) -> float:
        """Of a ball so large that its cube overflows, nothing is known."""
        return jacobian_lipschitz(width, longest + radius, n) if longest + radius < _LARGEST_BALL else math.inf

    return certify_root(inverse_norm, inverse_norm * (residual + floor) / scale, lipschitz)


def inverse_bound(point: AttentionPoint) -> tuple[float, int] | None:
    """An upper bound of ‖J⁻¹‖ and the sign of det J, without J; None where ‖E‖ may be 1 or more."""
    inverse, info = torch.linalg.inv_ex(point.F)
    if info or not inverse.isfinite().all():
        return None
    mixed = inverse.abs() @ _blocks(point)
    departure = float(torch.linalg.matrix_norm(mixed, 2)) if bool(mixed.isfinite().all()) else math.inf
    if not departure < 1:
        return None
    sign = int(torch.linalg.slogdet(point.F)[0]) ** point.X.shape[1]
    return float(torch.linalg.matrix_norm(inverse, 2)) / (1 - departure), sign


def _whole_inverse(whole: AttentionProblem, point: AttentionPoint, reduced: float) -> float:
    """A bound of ‖J⁻¹‖ of the whole problem at a point of the row space, given that of the reduced one."""
    bounded = inverse_bound(point)
    if bounded is not None:
        return bounded[0]
    if not math.isfinite(reduced):
        return math.inf
    if whole.size <= _DENSE_WHOLE:
        return _dense_inverse(point.jacobian().reshape(whole.size, whole.size))[0]
    blocks, weights = _blocks(point), torch.linalg.svdvals(point.F)
    if not (bool(blocks.isfinite().all()) and float(weights[-1]) > 0):
        return math.inf
    outside = 1 / float(weights[-1])
    corner = reduced * float(torch.linalg.matrix_norm(blocks, 2)) * outside
    return float(torch.linalg.matrix_norm(torch.tensor([[reduced, corner], [0, outside]], dtype=torch.float64), 2))


def _blocks(point: AttentionPoint) -> Float[Tensor, "n n"]:
    """Norms of the blocks of J − F ⊗ I."""
    blocks = point.weighted_offsets.norm(dim=2) * point.Z.norm(dim=1)[:, None]
    blocks.diagonal().add_(torch.linalg.matrix_norm(point.own_terms, 2))
    return blocks


def _dense_inverse(J: Float[Tensor, "m m"]) -> tuple[float, int]:
    if not J.isfinite().all():
        return math.inf, 0
    least = float(torch.linalg.svdvals(J)[-1])
    return (1 / least if least > 0 else math.inf), int(torch.linalg.slogdet(J)[0])
