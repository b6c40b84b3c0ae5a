"""One attention layer's output as a system of equations for its input, as small as it can be made.

    B = F(X)·X·V   →   Y = B V⁺ = F(X)·X   →   X = Z Qᵀ,  F(Z)·Z = Y Q  with W̃ = QᵀWQ

V is eliminated first. Then X is sought in the row space of Y: if F is invertible, X = F⁻¹Y lies in it, so n·r unknowns
are left of n·d.

Theorem (reduction): if rank(Y) = n, or the mask is causal, F is invertible at *every* pre-image (FX = Y needs rank
n; a causal F is triangular with f_ii > 0), so no pre-image is lost. Otherwise (repeated tokens) some may be.

Notation: n tokens, d their width, r = rank(Y) ≤ min(n, d), Q (d, r) an orthonormal basis of the row space of Y.
Limits: rank V = d, or B does not determine Y. If V has more columns than rows, B must lie in its row space.
Cost: residual n²r, product with J n²r, dense J n²r² numbers.
Source: ours; derivatives in `linalg/softmax_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.coarse import relative_rounding
from unmask.linalg.softmax_attention import AttentionMap, AttentionPoint

_RANK_ROUNDINGS = 64.0  # singular values below this many roundings of the largest are zeros


@dataclass(frozen=True)
class AttentionProblem:
    """F(Z)·Z − Y = 0 for Z (n, r), flattened by rows; X = Z·Qᵀ."""

    W: Float[Tensor, "r r"]
    Y: Float[Tensor, "n r"]
    basis: Float[Tensor, "d r"]
    causal: bool = False

    @cached_property
    def map(self) -> AttentionMap:
        """Z ↦ F(Z)·Z."""
        return AttentionMap(self.W, self.causal)

    @property
    def size(self) -> int:
        """Number of unknowns and of equations."""
        return self.Y.numel()

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """F(Z)·Z − Y at k points."""
        return (self.map(xs.reshape(-1, *self.Y.shape)) - self.Y).flatten(1)

    def jacobian(self, x: Float[Tensor, " m"]) -> Float[Tensor, "m m"]:
        """Dense, at one point."""
        return self.point(x).jacobian().reshape(self.size, self.size)

    def jacobians(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k m m"]:
        """Dense, at k points: f_im (I + r_im z_iᵀ) + δ_im Cov_i Wᵀ in one batch."""
        Z = xs.reshape(-1, *self.Y.shape)
        F = self.map.weights(Z)
        offsets = F[..., None] * (Z[:, None] - (F @ Z)[:, :, None])
        J = torch.einsum("kima,kib->kiamb", offsets, Z @ self.W)
        J.diagonal(dim1=2, dim2=4).add_(F[..., None])
        own = torch.einsum("kima,kmb->kabi", offsets, Z @ self.W.mT)
        J.diagonal(dim1=1, dim2=3).add_(own)
        return J.reshape(len(xs), self.size, self.size)

    def linearise(self, x: Float[Tensor, " m"]) -> PreconditionedPoint | None:
        """Products with J, preconditioned by (F ⊗ I)⁻¹; None where F is singular."""
        point = self.point(x)
        factors, pivots, info = torch.linalg.lu_factor_ex(point.F)
        return None if info else PreconditionedPoint(point, factors, pivots)

    def point(self, x: Float[Tensor, " m"]) -> AttentionPoint:
        """The map at one point, with its derivatives."""
        return self.map.at(x.reshape(self.Y.shape))

    def lift(self, x: Float[Tensor, " m"]) -> Float[Tensor, "n d"]:
        """X of a flat point."""
        return x.reshape(self.Y.shape) @ self.basis.mT

    def flat(self, X: Float[Tensor, "n d"]) -> Float[Tensor, " m"]:
        """The flat point of X (its part in the row space)."""
        return (X @ self.basis).reshape(-1)

    @cached_property
    def least_eigenvalue(self) -> float:
        """λ_min of the symmetric part of W̃: if it is positive, every Y has a pre-image, and an odd number of them."""
        return float(torch.linalg.eigvalsh((self.W + self.W.mT) / 2)[0])

    @property
    def is_exact(self) -> bool:
        """Whether the reduction has lost no pre-image (theorem in the module's docstring)."""
        return self.causal or self.Y.shape[1] in (len(self.Y), len(self.basis))

    @property
    def is_definite(self) -> bool:
        """sym(W̃) ≻ 0, beyond rounding."""
        rounding = 1e-14 * len(self.W) * float(torch.linalg.matrix_norm(self.W, 2))
        return self.least_eigenvalue > rounding


@dataclass(frozen=True)
class PreconditionedPoint:
    """J as products; A = (F ⊗ I)⁻¹, exact where the attention weights do not move."""

    point: AttentionPoint
    factors: Float[Tensor, "n n"]
    pivots: Tensor

    def jvp(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """J u."""
        return self.point.jvp(u.reshape(self.point.X.shape)).reshape(-1)

    def precondition(self, r: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """(F ⊗ I)⁻¹ r."""
        return torch.linalg.lu_solve(self.factors, self.pivots, r.reshape(self.point.X.shape)).reshape(-1)


@dataclass(frozen=True)
class Posed:
    """The evidence in float64 with V eliminated.

    `off_range` is the share of B that no input can produce (B must lie in the row space of V); `rounding` how coarsely
    B was rounded, relative to its largest entry: by its number type, or before it was stored in that type. `norms` are
    those of the rows of X, if they are known. `output_error` bounds ‖B − what the layer gave‖, rounding included.
    """

    W: Float[Tensor, "d d"]
    V: Float[Tensor, "d e"]
    B: Float[Tensor, "n e"]
    Y: Float[Tensor, "n d"]
    value_rank: int
    value_condition: float
    off_range: float
    rounding: float
    causal: bool
    norms: Float[Tensor, " n"] | None = None
    output_error: float = 0.0

    @property
    def mixed_error(self) -> float:
        """The same for Y: ‖B − …‖/σ_min(V)."""
        if self.output_error == 0:
            return 0.0
        return self.output_error * self.value_condition / float(torch.linalg.matrix_norm(self.V, 2))

    @property
    def has_full_rank(self) -> bool:
        """Whether every Y that its error allows has rank min(n, d), or the mask makes F invertible anyway."""
        return self.causal or float(torch.linalg.svdvals(self.Y)[-1]) > self.mixed_error

    def problem(self) -> AttentionProblem:
        """Reduced to the row space of Y."""
        _, sizes, directions = torch.linalg.svd(self.Y, full_matrices=False)
        floor = _RANK_ROUNDINGS * torch.finfo(torch.float64).eps * max(self.Y.shape)
        basis = directions[sizes > floor * sizes[0]].mT.contiguous()
        if basis.shape[1] == self.Y.shape[1]:
            return self.whole_problem()
        return AttentionProblem(basis.mT @ self.W @ basis, self.Y @ basis, basis, self.causal)

    def whole_problem(self) -> AttentionProblem:
        """Not reduced: for pre-images whose F is singular."""
        return AttentionProblem(self.W, self.Y, torch.eye(len(self.W), dtype=self.W.dtype), self.causal)

    def residual(self, X: Float[Tensor, "n d"]) -> float:
        """‖F(X)·X·V − B‖ / ‖B‖: the evidence, recomputed."""
        B = AttentionMap(self.W, self.causal)(X) @ self.V
        return float((B - self.B).norm() / self.B.norm().clamp(min=1e-300))


def rounding_error(output: Float[Tensor, "n e"]) -> float:
    """‖B − what the layer gave‖ at the most, if B was only rounded: by its number type, or before."""
    return relative_rounding(output) * float(output.detach().double().abs().max()) * output.numel() ** 0.5


def pose(evidence: AttentionEvidence, output_error: float | None = None) -> Posed:
    """Eliminate V; the evidence is left as it is. Without an error that is known, the output was only rounded."""
    W, V, B = (tensor.detach().to("cpu", torch.float64) for tensor in (evidence.W, evidence.V, evidence.output))
    left, sizes, right = torch.linalg.svd(V, full_matrices=False)
    floor = _RANK_ROUNDINGS * torch.finfo(evidence.V.dtype).eps * max(V.shape)
    kept = sizes > floor * sizes[0]
    rank = int(kept.sum())
    Y = ((B @ right[kept].mT) / sizes[kept]) @ left[:, kept].mT
    off_range = float((B - Y @ V).norm() / B.norm().clamp(min=1e-300))
    return Posed(
        W * evidence.scale,
        V,
        B,
        Y,
        rank,
        float(sizes[0] / sizes[rank - 1]) if rank else float("inf"),
        off_range,
        relative_rounding(evidence.output),
        evidence.causal,
        None if evidence.row_norms is None else evidence.row_norms.detach().to("cpu", torch.float64),
        rounding_error(evidence.output) if output_error is None else output_error,
    )
